"""Compute AUC and Spearman's rank correlation, with intervals from resampled groups of runs.

Runs are not independent: runs on a curve share initialisation and data order, runs of a mechanism the model. An
interval over single runs would be far too narrow. So `Draws` resamples whole units.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

NUM_DRAWS = 2000
FEWEST_UNITS = 3  # below, there is no interval
LEAST_DEFINED = 0.9  # minimum share of draws with a defined statistic
TAILS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval, NaN if none.

    ``draws``: its value per draw, for comparison with another estimate from the same `Draws`.
    """

    value: float
    low: float
    high: float
    draws: np.ndarray

    @staticmethod
    def of(value: float, draws: np.ndarray) -> Estimate:
        """Take percentiles over defined draws, if at least `LEAST_DEFINED` are defined."""
        known = draws[~np.isnan(draws)]
        if np.isnan(value) or not len(draws) or len(known) < LEAST_DEFINED * len(draws):
            return Estimate(value, np.nan, np.nan, draws)
        low, high = np.quantile(known, TAILS)
        return Estimate(value, float(low), float(high), draws)

    @property
    def has_interval(self) -> bool:
        return not np.isnan(self.low)

    def less(self, other: Estimate) -> Estimate:
        """Return the difference to another estimate, draw by draw."""
        same = len(self.draws) == len(other.draws)
        return Estimate.of(self.value - other.value, self.draws - other.draws if same else np.empty(0))


class Draws:
    """Units drawn with replacement, as many as exist; equal for every statistic.

    Below `FEWEST_UNITS` there are no draws.

    Args:
        units: each row's unit.
        num: number of draws.
        seed: for the generator.
    """

    def __init__(self, units: Sequence[Hashable], num: int = NUM_DRAWS, seed: int = 0):
        self.codes, names = pd.factorize(np.asarray(units, dtype=object))
        self.num_units = len(names)
        num = num if self.num_units >= FEWEST_UNITS else 0
        generator = np.random.default_rng(seed)
        self.drawn = generator.integers(0, max(1, self.num_units), size=(num, self.num_units))

    def counts(self) -> np.ndarray:
        """Return each unit's count per draw, shape (draws, units)."""
        number = len(self.drawn)
        cells = self.drawn + self.num_units * np.arange(number)[:, None]
        return np.bincount(cells.ravel(), minlength=number * self.num_units).reshape(number, self.num_units) * 1.0


def auc(scores: Sequence[float], events: Sequence[bool], draws: Draws, strata: Sequence[Hashable] = ()) -> Estimate:
    """Return the area under the ROC curve; NaN without pairs.

    This is the share of pairs, one run with the event and one without, in which the former scores higher; a tie counts
    half. Equals Mann and Whitney's U over the number of pairs (Hanley and McNeil 1982, Radiology 143:29).

    Args:
        scores: one per run; ±∞ allowed, NaN not.
        events: whether each run had the event.
        draws: resampled units.
        strata: only pairs within one stratum count; () for all pairs.
    """
    s, hit = np.asarray(scores, dtype=float), np.asarray(events, dtype=bool)
    assert not np.isnan(s).any(), "whoever leaves a run out says so"
    # Sums over pairs of units: each draw is then a quadratic form in the units' counts.
    won, pairs = _sum_by_units(s, hit, _codes(strata, len(s)), draws)
    total = float(pairs.sum())
    weights = draws.counts()
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = ((weights @ won) * weights).sum(axis=1) / ((weights @ pairs) * weights).sum(axis=1)
    return Estimate.of(float(won.sum()) / total if total else np.nan, drawn)


def share_in_order(
    scores: Sequence[float], places: Sequence[float], pairs: tuple[np.ndarray, np.ndarray], draws: Draws
) -> tuple[Estimate, int]:
    """Return the share of given pairs whose first run scores higher; a tie counts half.

    Pairs whose first run has the higher place weigh as much in all as those in which it has the lower, the fewer of
    the two: no rising or falling function of the place has another share than ½.

    Args:
        scores: one per run; ±∞ allowed, NaN not.
        places: one finite number per run.
        pairs: rows of the runs with the event, and of those without (`near_pairs`).
        draws: resampled units.

    Returns:
        The share, NaN without pairs, and the number of pairs that it is of.
    """
    s, x, (first, second) = np.asarray(scores, dtype=float), np.asarray(places, dtype=float), pairs
    assert not np.isnan(s).any(), "whoever leaves a run out says so"
    right, order = (s[first] > s[second]) + (s[first] == s[second]) / 2, np.sign(x[first] - x[second])
    counts = np.vstack([np.ones(draws.num_units), draws.counts()])  # first the runs as they are, then each draw
    won, number = np.zeros((2, 3, len(counts)))
    for kind, sign in enumerate((-1, 0, 1)):
        units = draws.codes[first[order == sign]], draws.codes[second[order == sign]]
        for sums, values in ((won, right[order == sign]), (number, 1.0)):
            by_units = np.zeros((draws.num_units, draws.num_units))
            np.add.at(by_units, units, values)
            sums[kind] = ((counts @ by_units) * counts).sum(axis=1)
    least = np.minimum(number[0], number[2])
    shares = won / np.maximum(number, 1)
    with np.errstate(invalid="ignore"):
        found = (won[1] + least * (shares[0] + shares[2])) / (number[1] + 2 * least)
    return Estimate.of(float(found[0]), found[1:]), int(number[1, 0] + 2 * least[0])


def near_pairs(
    places: Sequence[float], events: Sequence[bool], strata: Sequence[Hashable], within: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of a run with the event and one without, of one stratum, at most ``within`` apart.

    Args:
        places: one finite number per run.
        events: whether each run had the event.
        strata: one per run.
        within: largest distance of a pair's places.

    Returns:
        Rows of the runs with the event, and of those without.
    """
    x, hit, codes = np.asarray(places, dtype=float), np.asarray(events, dtype=bool), _codes(strata, len(places))
    keys = x + codes * (np.ptp(x) + 2 * within + 1)  # strata are further apart than any pair
    first, second = np.flatnonzero(hit), np.flatnonzero(~hit)
    second = second[np.argsort(keys[second], kind="stable")]
    low = np.searchsorted(keys[second], keys[first] - within, "left")
    high = np.searchsorted(keys[second], keys[first] + within, "right")
    number = high - low
    begins = np.repeat(low - (np.cumsum(number) - number), number)
    return np.repeat(first, number), second[begins + np.arange(number.sum())]


def _sum_by_units(s: np.ndarray, hit: np.ndarray, codes: np.ndarray, draws: Draws) -> np.ndarray:
    """Return won pairs and all pairs for each two units: the run with the event, and the one without."""
    ranks = np.unique(s, return_inverse=True)[1]
    found = np.zeros((2, draws.num_units, draws.num_units))
    for code in range(codes.max(initial=-1) + 1):
        first, second = (codes == code) & hit, (codes == code) & ~hit
        if not (first.any() and second.any()):
            continue
        # thousands of runs have millions of pairs: each run is placed among the other runs of each unit instead
        names, units = np.unique(draws.codes[second], return_inverse=True)
        begins = np.arange(len(names)) * len(s)
        keys, asked = np.sort(begins[units] + ranks[second]), begins + ranks[first][:, None]
        places = (np.searchsorted(keys, asked, "left") + np.searchsorted(keys, asked, "right")) / 2
        won, of_first = np.zeros((draws.num_units, len(names))), draws.codes[first]
        np.add.at(won, of_first, places - np.searchsorted(keys, begins))
        pairs = np.outer(np.bincount(of_first, minlength=draws.num_units), np.bincount(units))
        found[:, :, names] += np.stack([won, pairs])
    return found


def roc(
    scores: Sequence[float], events: Sequence[bool], strata: Sequence[Hashable] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ROC curve from (0, 0) to (1, 1), as false and true positive rates.

    With strata, their curves are averaged at equal false positive rates, weighted by pairs. The area below equals `auc`
    within them.

    Args:
        scores: one per run.
        events: whether each run had the event.
        strata: one per run; () for a single stratum.

    Returns:
        Two arrays, with one step per distinct score; empty if no stratum has both kinds of runs.
    """
    s, hit, codes = np.asarray(scores, dtype=float), np.asarray(events, dtype=bool), _codes(strata, len(scores))
    curves, pairs = [], []
    for code in range(codes.max(initial=-1) + 1):
        own = codes == code
        number = int(hit[own].sum()) * int((~hit[own]).sum())
        if number:
            curves.append(_steps(s[own], hit[own]))
            pairs.append(number)
    if len(curves) < 2:
        return curves[0] if curves else (np.empty(0), np.empty(0))
    shares = np.array(pairs) / sum(pairs)
    false = np.unique(np.concatenate([x for x, _ in curves]))
    # vertical steps: runs with the event follow each other, so read each curve from below and from above
    ends = [np.array([_read_off(x, y, false, side) for x, y in curves]) for side in ("left", "right")]
    true = np.stack([shares @ each for each in ends], axis=1)
    return np.repeat(false, 2), true.ravel()


def _steps(s: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ROC curve for runs with both outcomes."""
    thresholds = np.unique(s)[::-1]
    false, true = ((len(each) - np.searchsorted(np.sort(each), thresholds)) / len(each) for each in (s[~hit], s[hit]))
    return np.array([0.0, *false]), np.array([0.0, *true])


def _read_off(x: np.ndarray, y: np.ndarray, at: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
    """Return a step curve's height. At a jump: the lower end from the left, the upper from the right."""
    place = np.searchsorted(x, at, side) - (side == "right")
    return np.where(x[place] == at, y[place], np.interp(at, x, y))


def spearman(
    first: Sequence[float], second: Sequence[float], draws: Draws, strata: Sequence[Hashable] = ()
) -> Estimate:
    """Return Spearman's rank correlation; NaN if one side is constant.

    Equal values share their mean rank. With strata, ranks are taken within each, centred and divided by its size, then
    correlated over all. So differences between strata have no effect. A stratum with constant ``second`` is left out.

    Args:
        first: one value per row; ±∞ allowed, NaN not.
        second: as ``first``.
        draws: resampled units.
        strata: one per row; () for a single stratum.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    assert not (np.isnan(a).any() or np.isnan(b).any()), "whoever leaves a curve out says so"
    weights, codes = draws.counts()[:, draws.codes], _codes(strata, len(a))
    return Estimate.of(float(_rho(a, b, np.ones((1, len(a))), codes)[0]), _rho(a, b, weights, codes))


def _rho(a: np.ndarray, b: np.ndarray, weights: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return each draw's rank correlation, from row counts (``weights``) and stratum codes."""
    over, xx, yy = np.zeros((3, len(weights)))
    for code in range(codes.max(initial=-1) + 1):
        own = codes == code
        held = weights[:, own]
        x, y = (_centre(each[own], held) for each in (a, b))
        varies = (held * y * y).sum(axis=1) > 0
        over, xx, yy = (
            total + varies * (held * each).sum(axis=1)
            for total, each in zip((over, xx, yy), (x * y, x * x, y * y), strict=True)
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((xx > 0) & (yy > 0), over / np.sqrt(xx * yy), np.nan)


def _centre(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return centred ranks in each draw, as shares of the number drawn."""
    number = weights.sum(axis=1, keepdims=True)
    names, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    begins = np.searchsorted(place[order], np.arange(len(names)))
    held = np.add.reduceat(weights[:, order], begins, axis=1)  # each value's count; copies share their mean rank
    return ((np.cumsum(held, axis=1) - (held - 1) / 2)[:, place] - (number + 1) / 2) / np.maximum(number, 1)


def _codes(strata: Sequence[Hashable], number: int) -> np.ndarray:
    """Return each row's stratum as a number from 0; () is one stratum."""
    return pd.factorize(np.asarray(strata, dtype=object))[0] if len(strata) else np.zeros(number, dtype=int)


def shares_below(values: Sequence[float], strata: Sequence[Hashable] = ()) -> np.ndarray:
    """Return for each value the share of its stratum below.

    Equal values, itself included, count half. These are ranks from ½ on, divided by the stratum's size.
    """
    v, codes = np.asarray(values, dtype=float), _codes(strata, len(values))
    found = np.empty(len(v))
    for code in set(codes):
        own = codes == code
        found[own] = _centre(v[own], np.ones((1, int(own.sum()))))[0] + 0.5
    return found
