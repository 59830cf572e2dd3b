"""Measure how well numbers order what they are to tell apart: the area under a ROC curve and Spearman's rank
correlation, with intervals that draw whole groups of runs with replacement.

Runs are no independent draws: those of one curve share their initialisation and the order of their data, those of one
mechanism the model. An interval over single runs would be far too narrow, so that `Draws` resamples units, each with
all that belongs to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

NUM_DRAWS = 2000
FEWEST_UNITS = 3  # below that there is no interval
LEAST_DEFINED = 0.9  # share of the draws in which the statistic must exist
TAILS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A statistic with the ends of its 95 % interval, NaN where there is none. ``draws``: its value in each draw, by
    which it can be compared with another one of the same `Draws`."""

    value: float
    low: float
    high: float
    draws: np.ndarray

    @staticmethod
    def of(value: float, draws: np.ndarray) -> Estimate:
        """Take the percentiles of the draws in which the statistic exists, where these are `LEAST_DEFINED` or more."""
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
    """Units drawn with replacement, as many as there are, the same ones for every statistic.

    ``units``: whose each row is, of the rows that a statistic is about. Fewer than `FEWEST_UNITS` give no draws.
    """

    def __init__(self, units: Sequence[Hashable], num: int = NUM_DRAWS, seed: int = 0):
        self.codes, names = pd.factorize(np.asarray(units, dtype=object))
        self.num_units = len(names)
        num = num if self.num_units >= FEWEST_UNITS else 0
        generator = np.random.default_rng(seed)
        self.drawn = generator.integers(0, max(1, self.num_units), size=(num, self.num_units))

    def counts(self) -> np.ndarray:
        """Return how often each unit is drawn, a row a draw."""
        number = len(self.drawn)
        cells = self.drawn + self.num_units * np.arange(number)[:, None]
        return np.bincount(cells.ravel(), minlength=number * self.num_units).reshape(number, self.num_units) * 1.0


def auc(scores: Sequence[float], events: Sequence[bool], draws: Draws, strata: Sequence[Hashable] = ()) -> Estimate:
    """Return the share of pairs, one run with the event and one without, in which the first has the higher score, a tie
    counting half: the area under the ROC curve, which is Mann and Whitney's U over the number of pairs (Hanley and
    McNeil 1982, Radiology 143:29). NaN where there is no such pair.

    ``scores``: none NaN, ±∞ allowed. ``strata``: only pairs within one of them count, () for all pairs.
    """
    s, hit = np.asarray(scores, dtype=float), np.asarray(events, dtype=bool)
    assert not np.isnan(s).any(), "whoever leaves a run out says so"
    above = (s[hit][:, None] > s[~hit][None, :]) + 0.5 * (s[hit][:, None] == s[~hit][None, :])
    counts = np.ones_like(above)
    if len(strata):
        codes, _ = pd.factorize(np.asarray(strata, dtype=object))
        counts = (codes[hit][:, None] == codes[~hit][None, :]).astype(float)
    # Sums over pairs of units: a draw then is a quadratic form in how often each unit was drawn.
    won, pairs = (_by_units(each, draws.codes[hit], draws.codes[~hit], draws.num_units) for each in
                  (above * counts, counts))  # fmt: skip
    total = float(pairs.sum())
    weights = draws.counts()
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = ((weights @ won) * weights).sum(axis=1) / ((weights @ pairs) * weights).sum(axis=1)
    return Estimate.of(float(won.sum()) / total if total else np.nan, drawn)


def _by_units(pairs: np.ndarray, rows: np.ndarray, columns: np.ndarray, number: int) -> np.ndarray:
    """Return the sum over the pairs of each two units."""
    first, second = np.eye(number)[rows], np.eye(number)[columns]
    return first.T @ pairs @ second


def roc(scores: Sequence[float], events: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ROC curve, from (0, 0) to (1, 1): at each threshold the share of runs without the event, and of those
    with it, whose score is as high. Runs of one score are one step, so that the area below is `auc`."""
    s, hit = np.asarray(scores, dtype=float), np.asarray(events, dtype=bool)
    thresholds = np.unique(s)[::-1]
    false = [np.mean(s[~hit] >= each) for each in thresholds]
    true = [np.mean(s[hit] >= each) for each in thresholds]
    return np.array([0.0, *false]), np.array([0.0, *true])


def spearman(first: Sequence[float], second: Sequence[float], draws: Draws) -> Estimate:
    """Return Spearman's rank correlation, Pearson's of the ranks, equal values sharing their mean rank. NaN where one
    of the two is constant. None may be NaN, ±∞ are allowed."""
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    assert not (np.isnan(a).any() or np.isnan(b).any()), "whoever leaves a curve out says so"
    weights = draws.counts()[:, draws.codes]
    return Estimate.of(float(_rho(a, b, np.ones((1, len(a))))[0]), _rho(a, b, weights))


def _rho(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the rank correlation of each draw. ``weights``: how often it holds each row."""
    number = weights.sum(axis=1, keepdims=True)
    x, y = (_ranks(each, weights) - (number + 1) / 2 for each in (a, b))  # the mean rank is known
    over, xx, yy = ((weights * each).sum(axis=1) for each in (x * y, x * x, y * y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((xx > 0) & (yy > 0), over / np.sqrt(xx * yy), np.nan)


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value from 1 on, equal ones sharing their mean rank."""
    return _ranks(values, np.ones((1, len(values))))[0]


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return in each draw every value's rank among the drawn ones, copies sharing their mean rank."""
    names, place = np.unique(values, return_inverse=True)
    held = weights @ np.eye(len(names))[place]  # how often each value is there
    return (np.cumsum(held, axis=1) - (held - 1) / 2)[:, place]
