"""Compare pairs over seeds, of quantities known exactly or only by bounds. Numbers only; `claims` makes the sentences.

"Wider" compares the one window's lower with the other's upper bound. Where open ends leave that undecided, the parts
within the swept range are compared, if both were swept over the same one, and the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.numbers.spread import mean_interval
from analysis.numbers.windows import VALIDATION, SeriesWindows, outcomes
from analysis.study.load import Column, Study

# Two windows that differ by less are one: a hundredth of a decade is 2.3 % of a learning rate.
TIE_DECADES = 0.01
EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Comparison:
    """A paired comparison of two series: which is greater (+1 the first, -1 the second, 0 undecided), on how many
    paired seeds, over which scope, and the interval.

    ``differences``: by seed, where every one is known exactly; () where only bounds are."""

    direction: int
    n: int
    scope: Literal["whole", "range", "none"] = "none"
    interval: tuple[float, float] = EVERYTHING
    why_undecided: str = ""
    differences: tuple[float, ...] = ()


def decide(
    lows: list[float], highs: list[float], tie: float = 0.0, limit: float = math.inf
) -> tuple[int, tuple[float, float]]:
    """Return the sign of a paired difference known by a lower and an upper bound per seed: (direction, interval).

    Fewer than three seeds: all must agree, the interval is their range. Three or more: the Student-t 95 % interval of
    the mean lower (upper) bound must exclude 0. ``limit``: no difference can be larger than this; the interval is cut
    there, which takes nothing from its coverage.
    """
    if not lows:
        return 0, EVERYTHING
    low, high = (min(lows), max(highs)) if len(lows) < 3 else (mean_interval(lows)[0], mean_interval(highs)[1])
    return (1 if low > tie else -1 if high < -tie else 0), (max(low, -limit), min(high, limit))


Lost = Mapping[int, tuple[float, float]]  # seeds that diverged at every rate, and the range of the rates


def diverged_everywhere(study: Study, series: str, column: str = VALIDATION) -> Lost:
    """Return the seeds of a series all of whose runs diverged, none missing, with the range of their learning rates."""
    table = outcomes(study, series, column)
    return {
        int(seed): (float(table.index[0]), float(table.index[-1]))
        for seed in table.columns
        if np.isposinf(table[seed]).all()
    }


@dataclass(frozen=True)
class _Width:
    """Bounds of one seed's width. ``is_below_most``: it is less than ``most``, an edge lying below (above) a rate at
    which a run diverged."""

    least: float
    most: float
    most_in_grid: float
    grid: tuple[float, float]
    is_below_most: bool = False
    fills_grid: bool = False

    @staticmethod
    def of(found: SeriesWindows, seed: int, lost: Lost) -> _Width | None:
        """Return 0 where all of the seed's runs diverged, since no learning rate is stable; None where the width is not
        known, for runs are missing."""
        if seed in lost:
            return _Width(0.0, 0.0, 0.0, lost[seed])
        one = found.by_seed[seed]
        if one is None:
            return None
        is_below_most = "diverged" in (one.low.kind, one.high.kind)
        return _Width(one.width, one.width_max, one.width_max_in_grid, one.grid, is_below_most, one.fills_grid)


def compare_windows(first: SeriesWindows, second: SeriesWindows, lost: tuple[Lost, Lost] = ({}, {})) -> Comparison:
    """Compare seed by seed whether the first's windows are wider. ``lost``: of each, the seeds that
    `diverged_everywhere`: their width is 0.

    An edge next to a divergence lies strictly below the rate that diverged. So where the first is at least as wide as
    the second could be if that rate belonged to it, in every one of two seeds or more, the first is wider in each: that
    decides by the sign, whatever the bounds' spread. An interval of parts within the swept range, or of windows that
    all end in it, is cut at the width of that range, which no difference can pass.
    """
    seeds = sorted(first.by_seed.keys() & second.by_seed.keys())
    pairs = [(_Width.of(first, seed, lost[0]), _Width.of(second, seed, lost[1])) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs or len(known) < len(pairs):
        return Comparison(0, len(pairs), why_undecided="in one seed or more a mechanism has no finished run")
    swept = max(math.log10(each.grid[1] / each.grid[0]) for pair in known for each in pair)
    closed = all(math.isfinite(each.most) for pair in known for each in pair)
    whole, interval = _decide(
        [(a.least, a.most, b.least, b.most) for a, b in known], known, swept if closed else math.inf
    )
    if whole:
        return Comparison(whole, len(pairs), "whole", interval)
    if any(a.grid != b.grid for a, b in known):
        why = "the two were swept over different ranges and a window is open or next to a divergence"
        return Comparison(0, len(pairs), "none", interval, why)
    part, interval = _decide([(a.least, a.most_in_grid, b.least, b.most_in_grid) for a, b in known], known, swept)
    if part:
        return Comparison(part, len(pairs), "range", interval)
    if all(a.fills_grid and b.fills_grid for a, b in known):
        why = "both windows fill the whole sweep, a wider range of learning rates would tell"
        return Comparison(0, len(pairs), "none", interval, why)
    exact = all(math.isclose(each.least, each.most) for pair in known for each in pair)
    differences = tuple(a.least - b.least for a, b in known) if exact else ()
    why = "the interval of the paired differences contains 0"
    if len(pairs) < 3:
        why = "the seeds disagree, or edges next to diverged or missing runs leave too much room"
    return Comparison(0, len(pairs), "none", interval, why, differences)


def _decide(
    bounds: list[tuple[float, float, float, float]], known: list[tuple[_Width, _Width]], limit: float
) -> tuple[int, tuple[float, float]]:
    """Decide as `decide` does, from the bounds (least, most) of both widths, and by the sign where every seed's bound
    is strict."""
    lows, highs = [least - most for least, _, _, most in bounds], [most - least for _, most, least, _ in bounds]
    direction, interval = decide(lows, highs, TIE_DECADES, limit)
    rounding = 1e-9
    if not direction and len(known) > 1 and all(b.is_below_most for _, b in known) and min(lows) >= -rounding:
        return 1, (0.0, interval[1])
    if not direction and len(known) > 1 and all(a.is_below_most for a, _ in known) and max(highs) <= rounding:
        return -1, (interval[0], 0.0)
    return direction, interval


@dataclass(frozen=True)
class Bests:
    """The best NLL of two series: medians over seeds, each seed's over the rates at which it has both; ``differences``:
    first − second by seed, as a share of the second (±∞ where one of the two diverged at every rate, so that its best
    is infinitely bad); ``result``: of these; ``lost``: in how many seeds the first, and the second, diverged at every
    rate."""

    first: float
    second: float
    result: Comparison
    differences: tuple[float, ...]
    lost: tuple[int, int] = (0, 0)


def compare_bests(study: Study, first: str, second: str, column: str = VALIDATION) -> Bests | None:
    """Compare the best NLL of two series seed by seed; None where no seed makes a pair (`_bests_of_seed`)."""
    tables = [outcomes(study, name, column) for name in (first, second)]
    lrs, seeds = (
        sorted(set(getattr(tables[0], axis)) & set(getattr(tables[1], axis))) for axis in ("index", "columns")
    )
    found = (_bests_of_seed(*(table.loc[lrs, seed] for table in tables)) for seed in seeds)
    pairs = [pair for pair in found if pair is not None]
    if not pairs:
        return None
    differences = [math.inf if math.isinf(a) else -math.inf if math.isinf(b) else (a - b) / abs(b) for a, b in pairs]
    direction, interval = decide(differences, differences)
    medians = np.median(pairs, axis=0)
    lost = (sum(math.isinf(a) for a, _ in pairs), sum(math.isinf(b) for _, b in pairs))
    result = Comparison(direction, len(pairs), "whole", interval)
    return Bests(float(medians[0]), float(medians[1]), result, tuple(differences), lost)


def _bests_of_seed(first: Column, second: Column) -> tuple[float, float] | None:
    """Return the lower NLL of both series over the rates at which both have a result, ∞ of a series that diverged at
    all of its rates.

    None where this is no pair: both diverged everywhere, or one has nothing finite at the rates they share while runs
    of it that are missing, or at other rates, may have it.
    """
    both = first.notna() & second.notna()
    bests = (float(first[both].min()), float(second[both].min())) if both.any() else (math.inf, math.inf)
    lost = [bool(np.isposinf(each).all()) for each in (first, second)]
    is_known = all(math.isfinite(best) or every for best, every in zip(bests, lost, strict=True))
    return bests if is_known and any(map(math.isfinite, bests)) else None
