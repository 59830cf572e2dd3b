"""Compare series in pairs over seeds, for exact quantities and bounds.

This module returns numbers; `claims` makes the sentences. A window is "wider" if its lower bound exceeds the other's
upper bound. If open ends leave this undecided, only the parts within the swept range are compared. Both series must
have been swept over the same range, and the result's ``scope`` is then "range".

Two things must decide: the seeds, by the interpolated edges, and the grid, by the brackets of the edges. A difference
that the brackets allow to vanish is not resolved by the grid, however well the seeds agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.numbers.spread import mean_interval, p_of_bounds, p_of_signs, signs_decide
from analysis.numbers.windows import VALIDATION, SeriesWindows, outcomes
from analysis.study.load import Column, Frame, Study

# Smaller differences count as equal: a hundredth of a decade is 2.3 % of a learning rate.
TIE_DECADES = 0.01
MOST_RUNS = 500
UNRESOLVED = "the brackets of the edges allow the difference to vanish"
EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Comparison:
    """A paired comparison between two series.

    Attributes:
        direction: +1 if the first is greater, −1 if the second is, 0 if undecided.
        n: paired seeds.
        scope: "whole" windows, parts within the swept "range", or "none".
        interval: interval of the difference.
        why_undecided: reason for direction 0.
        differences: by seed if all are exact, else ().
        p: Student's p-value of the direction, two-sided; NaN below three seeds.
        size: bounds on the mean difference; equal if all are exact.
        grid: bounds on the mean difference by the edges' brackets, without interpolation.
        more_runs: further runs that would resolve the difference; None: more than `MOST_RUNS`, or resolved.
    """

    direction: int
    n: int
    scope: Literal["whole", "range", "none"] = "none"
    interval: tuple[float, float] = EVERYTHING
    why_undecided: str = ""
    differences: tuple[float, ...] = ()
    p: float = math.nan
    size: tuple[float, float] = (math.nan, math.nan)
    grid: tuple[float, float] = EVERYTHING
    more_runs: int | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether the brackets of the edges exclude a difference of 0."""
        return self.why_undecided != UNRESOLVED


def decide(
    lows: list[float], highs: list[float], tie: float = 0.0, limit: float = math.inf
) -> tuple[int, tuple[float, float]]:
    """Return the sign and interval of a paired difference, from bounds per seed.

    Below three seeds all must agree, and the interval is their range. With three or more, the Student-t 95 % interval
    of the mean lower (upper) bound must exclude 0.

    Args:
        lows: lower bound per seed.
        highs: upper bound per seed.
        tie: largest absolute difference treated as 0.
        limit: largest possible difference. The interval is clipped there, without loss of coverage.

    Returns:
        (direction, interval).
    """
    if not lows:
        return 0, EVERYTHING
    low, high = (min(lows), max(highs)) if len(lows) < 3 else (mean_interval(lows)[0], mean_interval(highs)[1])
    return (1 if low > tie else -1 if high < -tie else 0), (max(low, -limit), min(high, limit))


def decide_with_lost(lows: list[float], highs: list[float], tie: float) -> tuple[int, tuple[float, float], int]:
    """Return direction, interval and the number of infinite differences, from bounds per seed.

    An infinite difference means that one side has no rate with a result; then the sign test decides, or this itself in
    every seed.

    Args:
        lows: lower bound per seed.
        highs: upper bound per seed.
        tie: largest absolute difference treated as 0.
    """
    if lost := sum(low == high and math.isinf(low) for low, high in zip(lows, highs, strict=True)):
        agreed = find_agreement(lows, highs, tie)
        return (agreed if lost == len(lows) or signs_decide(len(lows)) else 0), (min(lows), max(highs)), lost
    return *decide(lows, highs, tie), 0


def find_agreement(lows: list[float], highs: list[float], tie: float) -> int:
    """Return the sign of all differences, from bounds per seed; 0 if they differ or one may be a tie.

    Args:
        lows: lower bound per seed.
        highs: upper bound per seed.
        tie: largest absolute difference treated as 0.
    """
    return 1 if min(lows) > tie else -1 if max(highs) < -tie else 0


def p_of_agreement(lows: list[float], highs: list[float], tie: float) -> float:
    """Return the sign test's p-value of differences with infinite ones, 1 if they disagree; NaN if all are infinite.

    Args:
        lows: lower bound per seed.
        highs: upper bound per seed.
        tie: largest absolute difference treated as 0.
    """
    if len(lows) < 3 or all(map(math.isinf, (*lows, *highs))):
        return math.nan
    return p_of_signs(len(lows)) if find_agreement(lows, highs, tie) else 1.0


Lost = Mapping[int, tuple[float, float]]  # seeds diverged at every rate, with the range of rates


def find_lost_seeds(study: Study, series: str, column: str = VALIDATION) -> Lost:
    """Return the seeds whose runs all diverged, with the range of their learning rates.

    A seed with missing runs is left out.

    Args:
        study: supplies the runs.
        series: name of the series.
        column: NLL column.
    """
    table = outcomes(study, series, column)
    return {
        int(seed): (float(table.index[0]), float(table.index[-1]))
        for seed in table.columns
        if np.isposinf(table[seed]).all()
    }


@dataclass(frozen=True)
class _Width:
    """Bounds on one seed's width, in decades.

    ``is_below_most``: the width is strictly below ``most``, because an edge borders on a divergence. ``bracket``:
    bounds by the measured rates alone. ``gaps``: width of each edge's bracket.
    """

    least: float
    most: float
    most_in_grid: float
    grid: tuple[float, float]
    is_below_most: bool = False
    fills_grid: bool = False
    bracket: tuple[float, float] = (0.0, 0.0)
    bracket_in_grid: tuple[float, float] = (0.0, 0.0)
    gaps: tuple[float, ...] = ()

    @staticmethod
    def of(found: SeriesWindows, seed: int, lost: Lost) -> _Width | None:
        """Return the seed's width. 0 if all its runs diverged, None if unknown because runs are missing."""
        if seed in lost:
            return _Width(0.0, 0.0, 0.0, lost[seed])
        one = found.by_seed[seed]
        if one is None:
            return None
        return _Width(
            one.width,
            one.width_max,
            one.width_max_in_grid,
            one.grid,
            is_below_most="diverged" in (one.low.kind, one.high.kind),
            fills_grid=one.fills_grid,
            bracket=one.bracket,
            bracket_in_grid=one.bracket_in_grid,
            gaps=tuple(edge.bracket_decades for edge in (one.low, one.high)),
        )


Pairs = list[tuple[_Width, _Width]]


def compare_windows(first: SeriesWindows, second: SeriesWindows, lost: tuple[Lost, Lost] = ({}, {})) -> Comparison:
    """Compare seed by seed whether the first's windows are wider.

    Args:
        first: windows of one series.
        second: windows of the other.
        lost: `find_lost_seeds` for both; these seeds have width 0.
    """
    seeds = sorted(first.by_seed.keys() & second.by_seed.keys())
    pairs = [(_Width.of(first, seed, lost[0]), _Width.of(second, seed, lost[1])) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs or len(known) < len(pairs):
        return Comparison(0, len(pairs), why_undecided="in one seed or more a mechanism has no finished run")
    exact = all(math.isclose(each.least, each.most) for pair in known for each in pair)
    differences = tuple(a.least - b.least for a, b in known) if exact else ()
    swept = max(math.log10(each.grid[1] / each.grid[0]) for pair in known for each in pair)
    # without open windows, as within the swept range below, no difference can exceed the range's width
    closed = all(math.isfinite(each.most) for pair in known for each in pair)
    bounds = [(a.least, a.most, b.least, b.most) for a, b in known]
    whole, interval, p = _decide(bounds, known, swept if closed else math.inf)
    size = _size(bounds)
    if whole:
        found = Comparison(whole, len(pairs), "whole", interval, "", differences, p, size)
        return _resolve(found, known, [(a.bracket, b.bracket) for a, b in known])
    undecided = Comparison(0, len(pairs), "none", interval, "", differences, p, size)
    if any(a.grid != b.grid for a, b in known):
        why = "the two were swept over different ranges and a window is open or next to a divergence"
        return replace(undecided, why_undecided=why, differences=())
    in_grid = [(a.least, a.most_in_grid, b.least, b.most_in_grid) for a, b in known]
    part, interval, p = _decide(in_grid, known, swept)
    if part:
        found = Comparison(part, len(pairs), "range", interval, "", differences, p, _size(in_grid))
        return _resolve(found, known, [(a.bracket_in_grid, b.bracket_in_grid) for a, b in known])
    undecided = replace(undecided, interval=interval, p=p)
    if all(a.fills_grid and b.fills_grid for a, b in known):
        why = "both windows fill the whole sweep, a wider range of learning rates would tell"
        return replace(undecided, why_undecided=why, differences=())
    why = "the interval of the paired differences contains 0"
    if len(pairs) < 3:
        why = "the seeds disagree, or edges next to diverged or missing runs leave too much room"
    return replace(undecided, why_undecided=why)


def _size(bounds: list[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return bounds on the mean difference of two widths, from both widths' bounds by seed."""
    return (
        float(np.mean([least - most for least, _, _, most in bounds])),
        float(np.mean([most - least for _, most, least, _ in bounds])),
    )


def _resolve(found: Comparison, known: Pairs, brackets: list[tuple[tuple[float, float], tuple[float, float]]]):
    """Return a comparison with its bounds by the grid; undecided if these contain 0.

    Each bracket is a worst case for its seed, so the bounds of the mean are the means of the bounds.
    """
    low = float(np.mean([a[0] - b[1] for a, b in brackets]))
    high = float(np.mean([a[1] - b[0] for a, b in brackets]))
    decided = replace(found, grid=(low, high))
    rounding = 1e-9
    if (low if found.direction > 0 else -high) >= -rounding:
        return decided
    gaps = np.median([[*a.gaps, *b.gaps] for a, b in known], axis=0)
    size = abs(float(np.mean([a.least - b.least for a, b in known])))
    more = bisections_needed([gap for gap in gaps if math.isfinite(gap)], size)
    runs = None if more is None or more * found.n > MOST_RUNS else more * found.n
    return replace(decided, direction=0, why_undecided=UNRESOLVED, more_runs=runs)


def bisections_needed(gaps: Sequence[float], difference: float) -> int | None:
    """Return the number of new rates after which the brackets' sum is below a difference of widths.

    Each new rate halves the widest bracket, as `lr=edge` does.

    Args:
        gaps: width of each bracket, in decades.
        difference: difference of the widths, in decades.

    Returns:
        None beyond `MOST_RUNS`.
    """
    left, number = sorted(gaps), 0
    while sum(left) >= difference:
        if number == MOST_RUNS or not left:
            return None
        left[-1] /= 2
        left.sort()
        number += 1
    return number


def _decide(
    bounds: list[tuple[float, float, float, float]], known: Pairs, limit: float
) -> tuple[int, tuple[float, float], float]:
    """Decide as `decide`, from both widths' bounds. If all seeds' bounds are strict, the sign test decides, too.

    Returns:
        (direction, interval, p-value).
    """
    lows, highs = [least - most for least, _, _, most in bounds], [most - least for _, most, least, _ in bounds]
    direction, interval = decide(lows, highs, TIE_DECADES, limit)
    rounding = 1e-9
    # An edge next to a divergence lies strictly below the diverged rate. If the first is at least as wide as the
    # second's bound in each seed, then it is wider in each, whatever the spread.
    if not direction and signs_decide(len(known)):
        p_value = p_of_signs(len(known))
        if all(b.is_below_most for _, b in known) and min(lows) >= -rounding:
            return 1, (0.0, interval[1]), p_value
        if all(a.is_below_most for a, _ in known) and max(highs) <= rounding:
            return -1, (interval[0], 0.0), p_value
    return direction, interval, p_of_bounds(lows, highs, TIE_DECADES)


@dataclass(frozen=True)
class Bests:
    """The best NLLs of two series over seeds, at their common rates.

    Attributes:
        first, second: medians over seeds.
        result: comparison of the differences.
        differences: first − second by seed, relative to the second; ±∞ if one diverged at every rate.
        lost: number of seeds in which the first, and the second, diverged at every rate.
    """

    first: float
    second: float
    result: Comparison
    differences: tuple[float, ...]
    lost: tuple[int, int] = (0, 0)


def compare_bests(study: Study, first: str, second: str, column: str = VALIDATION) -> Bests | None:
    """Compare the best NLLs of two series seed by seed.

    Args:
        study: supplies the runs.
        first: name of one series.
        second: name of the other.
        column: NLL column.

    Returns:
        None without a valid pair (`_bests_of_seed`).
    """
    return compare_lowest(outcomes(study, first, column), outcomes(study, second, column))


def compare_lowest(first: Frame, second: Frame) -> Bests | None:
    """Compare the lowest NLLs of two tables seed by seed, at their common rates.

    Args:
        first: NLL, learning rate × seed; ∞ if diverged, NaN without a result.
        second: the other's.

    Returns:
        None without a valid pair (`_bests_of_seed`).
    """
    lrs, seeds = (sorted(set(getattr(first, axis)) & set(getattr(second, axis))) for axis in ("index", "columns"))
    found = (_bests_of_seed(*(table.loc[lrs, seed] for table in (first, second))) for seed in seeds)
    pairs = [pair for pair in found if pair is not None]
    if not pairs:
        return None
    differences = [math.inf if math.isinf(a) else -math.inf if math.isinf(b) else (a - b) / abs(b) for a, b in pairs]
    direction, interval = decide(differences, differences)
    medians = np.median(pairs, axis=0)
    lost = (sum(math.isinf(a) for a, _ in pairs), sum(math.isinf(b) for _, b in pairs))
    p = p_of_bounds(differences, differences)
    size = float(np.mean(differences))
    result = Comparison(direction, len(pairs), "whole", interval, "", tuple(differences), p, (size, size))
    return Bests(float(medians[0]), float(medians[1]), result, tuple(differences), lost)


def _bests_of_seed(first: Column, second: Column) -> tuple[float, float] | None:
    """Return both series' lowest NLL over common rates. One diverged at all its rates has ∞.

    None if both diverged everywhere. None also if one has no finite NLL at common rates, but missing runs or other
    rates may have one.
    """
    both = first.notna() & second.notna()
    bests = (float(first[both].min()), float(second[both].min())) if both.any() else (math.inf, math.inf)
    lost = [bool(np.isposinf(each).all()) for each in (first, second)]
    is_known = all(math.isfinite(best) or every for best, every in zip(bests, lost, strict=True))
    return bests if is_known and any(map(math.isfinite, bests)) else None
