"""Attach sample size, interval and p-value to a number, and correct the p-values of many claims in one report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

SEED_RANGE = "smallest and largest over the seeds, from nine seeds on a 95 % interval of the median"
MEDIAN_RULE = f"Second line: {SEED_RANGE}"
FEW_RULE, FEWEST_FOR_MEDIANS = "Second line: smallest and largest over the seeds", 9
MEAN_RULE = "Second line: Student-t 95 % interval of the mean (n ≥ 3) or smallest and largest (n = 2)"


def t_975(degrees: int, level: float = 0.05) -> float:
    """Return the 97.5 % quantile of Student's t, or that of another two-sided level; ∞ below one degree of freedom."""
    return float(stdtrit(degrees, 1 - level / 2)) if degrees >= 1 else math.inf


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the Student-t 95 % interval of the mean.

    Infinite below two values, or if a value is not finite.
    """
    array = np.asarray(list(values), dtype=float)
    if len(array) < 2 or not np.isfinite(array).all():
        return (-math.inf, math.inf)
    half = t_975(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return (float(array.mean()) - half, float(array.mean()) + half)


def interval(values: Iterable[float], is_positive: bool = False) -> tuple[float, float]:
    """Return the Student-t 95 % interval of the mean; below three values, smallest and largest.

    A back-transformed interval follows Bland and Altman 1996, BMJ 312:1079.

    Args:
        values: one per seed.
        is_positive: whether the quantity is multiplicative. The interval is then the geometric mean's, by logarithms:
            on the values themselves it easily passes 0. Smallest and largest if a value is not above 0.
    """
    array = np.asarray(list(values), dtype=float)
    if not len(array):
        return (-math.inf, math.inf)
    if len(array) < 3 or (is_positive and not array.min() > 0):
        return (float(array.min()), float(array.max()))
    low, high = np.exp(mean_interval(np.log(array))) if is_positive else mean_interval(array)
    return float(low), float(high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with at least 95 % probability.

    Below nine values they are the smallest and the largest. Of n = 2 to 5 values these hold the median with a lower
    probability, 1 − 2^(1−n): 75 % of three. For any continuous distribution (Conover 1999, Practical Nonparametric
    Statistics, 3.2).

    Args:
        values: at least one finite number.
    """
    ordered, number = sorted(values), len(values)
    below = np.cumsum([math.comb(number, count) for count in range(number)]) / 2.0**number  # P(Binomial ≤ count)
    rank = max(1, int((below <= 0.025).sum()))
    return float(ordered[rank - 1]), float(ordered[-rank])


@dataclass(frozen=True)
class Spread:
    """A median over seeds with `median_interval` and n; NaN without a finite value."""

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Return the spread over the finite values."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return Spread(math.nan, math.nan, math.nan, 0)
        return Spread(float(np.median(finite)), *median_interval(finite), len(finite))

    def detail(self, form=lambda value: f"{value:.3f}") -> str:
        """Return the line below the median: both ends and n, or n alone."""
        return f"n={self.n}" if self.n < 2 else f"{form(self.low)}–{form(self.high)}, n={self.n}"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its `interval` and n, where a sign or a limit is asked for; NaN without a finite value."""

    mean: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(values: Iterable[float], is_positive: bool = False) -> Mean:
        """Return the mean over the finite values; of a multiplicative quantity, the geometric one (see `interval`)."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return Mean(math.nan, math.nan, math.nan, 0)
        is_geometric = is_positive and min(finite) > 0
        mean = math.exp(np.mean(np.log(finite))) if is_geometric else np.mean(finite)
        return Mean(float(mean), *interval(finite, is_positive), len(finite))

    def detail(self, form=lambda value: f"{value:+.3f}") -> str:
        """Return the line below the mean: both ends and n, or n alone."""
        return f"n={self.n}" if self.n < 2 else f"{form(self.low)} to {form(self.high)}, n={self.n}"


MOST_SEEDS = 100


def seeds_needed(differences: Sequence[float], margin: float = math.nan, level: float = 0.05) -> int | None:
    """Return the smallest number of seeds with a decisive Student-t interval.

    Decisive: at the observed mean and spread, the interval excludes 0, or lies below ``margin``.

    Args:
        differences: paired differences by seed.
        margin: upper limit of equality; NaN to exclude 0.
        level: two-sided level, smaller if many claims are corrected.

    Returns:
        None beyond `MOST_SEEDS`, or below two differences.
    """
    values = np.asarray(differences, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    room = abs(mean) if math.isnan(margin) else margin - mean
    return next((n for n in range(3, MOST_SEEDS + 1) if room > t_975(n - 1, level) * deviation / math.sqrt(n)), None)


def share_interval(hits: int, number: int) -> tuple[float, float]:
    """Return the exact (Clopper–Pearson) 95 % interval for ``hits`` in ``number`` independent draws."""
    assert 0 <= hits <= number and number > 0

    def at_least(share: float) -> float:  # P(X ≥ hits), rising in the share
        return math.fsum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(hits, number + 1))

    def at_most(share: float) -> float:  # P(X ≤ hits), falling
        return math.fsum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(hits + 1))

    # the ends solve binomial tails equal to 2.5 %
    low = 0.0 if hits == 0 else _bisect(lambda share: at_least(share) > 0.025)
    high = 1.0 if hits == number else _bisect(lambda share: at_most(share) <= 0.025)
    return low, high


def p_of_share(hits: int, number: int, share: float = 0.5) -> float:
    """Return the exact two-sided p-value of a share, twice the smaller binomial tail.

    Below `LEVEL` exactly if `share_interval` excludes the share.

    Args:
        hits: of the draws.
        number: independent draws.
        share: the tested probability.
    """

    def tail(counts: range) -> float:
        return math.fsum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in counts)

    return min(1.0, 2 * min(tail(range(hits, number + 1)), tail(range(hits + 1))))


def p_of_signs(number: int) -> float:
    """Return the sign test's p-value of seeds that all agree, without their sizes; NaN below three seeds."""
    return math.nan if number < 3 else p_of_share(number, number)


def signs_decide(number: int) -> bool:
    """Return whether so many seeds that all agree decide by their signs: two indicate, from six on p ≤ 0.05."""
    return number == 2 or p_of_signs(number) <= LEVEL


def _bisect(is_above: Callable[[float], bool]) -> float:
    """Return the smallest point in [0, 1] satisfying a monotone condition."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


LEVEL = 0.05


def p_beyond(values: Sequence[float], limit: float = 0.0) -> float:
    """Return Student's p-value of a mean above a limit, doubled because both directions are tested.

    Below `LEVEL` exactly if the 95 % interval of the mean lies above the limit.

    Args:
        values: paired differences by seed.
        limit: a number to exceed.

    Returns:
        NaN below three values; 1 if one is not finite.
    """
    array = np.asarray(values, dtype=float)
    if len(array) < 3:
        return math.nan
    if not np.isfinite(array).all():
        return 1.0
    room, error = float(array.mean()) - limit, float(array.std(ddof=1)) / math.sqrt(len(array))
    if error == 0:
        return 0.0 if room > 0 else 1.0
    return min(1.0, 2 * float(stdtr(len(array) - 1, -room / error)))


def p_of_bounds(lows: Sequence[float], highs: Sequence[float], tie: float = 0.0) -> float:
    """Return the smaller p-value of both directions, from lower and upper bounds of the differences.

    Args:
        lows: lower bound by seed.
        highs: upper bound by seed.
        tie: largest absolute difference treated as 0.
    """
    return min(p_beyond(lows, tie), p_beyond([-high for high in highs], tie))


def compare_means(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float], float]:
    """Return the difference of two means, its 95 % interval and its p-value by Welch's t (Biometrika 34:28, 1947).

    Args:
        first: values, two or more.
        second: values whose mean is taken off, two or more.
    """
    samples = [np.asarray(values, dtype=float) for values in (first, second)]
    difference = float(samples[0].mean() - samples[1].mean())
    squares = [float(values.var(ddof=1)) / len(values) for values in samples]
    error = math.sqrt(sum(squares))
    if error == 0:
        return difference, (difference, difference), 0.0 if difference else 1.0
    freedom = error**4 / sum(square**2 / (len(values) - 1) for square, values in zip(squares, samples, strict=True))
    half = error * float(stdtrit(freedom, 1 - LEVEL / 2))
    p = min(1.0, 2 * float(stdtr(freedom, -abs(difference) / error)))
    return difference, (difference - half, difference + half), p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method (Scand. J. Statist. 6:65, 1979).

    The i-th smallest of m is multiplied by m + 1 − i. Corrected values never decrease with the given ones.
    """
    order, corrected, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected
