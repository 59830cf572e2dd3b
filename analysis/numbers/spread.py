"""Attach sample size and interval to a number, and format both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.special import stdtrit

Scale = Literal["real", "positive", "share", "extreme"]
REAL: Scale = "real"  # differences and slopes with any sign; nats, additive and far from 0
POSITIVE: Scale = "positive"  # norms, ratios, rates: above 0, multiplicative
SHARE: Scale = "share"  # between 0 and 1
# a run's largest or worst value: a mean over seeds describes nothing, the smallest and largest do
EXTREME: Scale = "extreme"

INTERVAL_RULE = "Second line: min–max over the seeds (n = 2) or Student-t 95 % interval of the mean (n ≥ 3)"
INTERVAL_RULES: dict[Scale, str] = {
    REAL: INTERVAL_RULE,
    POSITIVE: (
        "Second line: min–max over the seeds (n = 2, a value of 0, or an interval over more than a decade) or 95 % "
        "interval of the geometric mean (n ≥ 3), by Student's t on logarithms"
    ),
    SHARE: "Second line: min–max over the seeds (n = 2, or a share of 0 or 1) or 95 % interval (n ≥ 3) by Student's t "
    "on the log-odds",
    EXTREME: "Second line: smallest and largest over the seeds",
}


DECADE = 10.0


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


def interval(values: Iterable[float], scale: Scale = REAL) -> tuple[float, float]:
    """Return a 95 % interval within the quantity's range; below three values, smallest and largest.

    Back-transformed intervals follow Bland and Altman 1996, BMJ 312:1079; for shares Brown, Cai and DasGupta 2001.

    Args:
        values: one per seed.
        scale: "real" uses Student's t on the values (mean). "positive" uses logarithms (geometric mean). "share" uses
            log-odds. "extreme" returns smallest and largest.
    """
    array = np.asarray(list(values), dtype=float)
    lower, upper = {REAL: (-math.inf, math.inf), SHARE: (0.0, 1.0)}.get(
        scale, (0.0 if scale == POSITIVE else -math.inf, math.inf)
    )
    if not len(array):
        return (-math.inf, math.inf)
    # A Student interval over three heavy-tailed positive values easily passes 0, hence the transforms. A value at the
    # scale's end (a norm of 0, a share of 0 or 1, or beyond by rounding, as for an eigenvalue of 0) has no finite
    # transform. The largest of many tokens ("extreme") has no mean worth estimating from a few seeds.
    if len(array) < 3 or scale == EXTREME or (scale != REAL and not (lower < array.min() and array.max() < upper)):
        return (float(array.min()), float(array.max()))
    if scale == POSITIVE:
        low, high = np.exp(mean_interval(np.log(array)))
    elif scale == SHARE:
        low, high = 1 / (1 + np.exp(-np.asarray(mean_interval(np.log(array / (1 - array))))))
    else:
        low, high = mean_interval(array)
    return float(low), float(high)


@dataclass(frozen=True)
class Spread:
    """A median with n and an interval on the quantity's `Scale` (see `interval`).

    Two values: min–max. Three or more: 95 %. One: none. ``printed``: both ends in a table, min–max if a positive
    quantity's interval spans more than a decade and so says nothing. Verdicts use ``low`` and ``high``.
    """

    median: float
    low: float
    high: float
    n: int
    printed: tuple[float, float] = field(default=(math.nan, math.nan), compare=False)

    @staticmethod
    def of(values: Iterable[float], scale: Scale = REAL) -> Spread:
        """Return the spread over the finite values; n = 0 and NaN if none."""
        finite = np.asarray([value for value in values if math.isfinite(value)], dtype=float)
        if len(finite) == 0:
            return Spread(math.nan, math.nan, math.nan, 0)
        low, high = interval(finite, scale)
        is_wide = scale == POSITIVE and high > DECADE * low
        printed = (float(finite.min()), float(finite.max())) if is_wide else (low, high)
        return Spread(float(np.median(finite)), low, high, len(finite), printed)

    def detail(self, form=lambda value: f"{value:.3f}") -> str:
        """Return the line below the median: interval and n, or n alone."""
        return f"n={self.n}" if self.n < 2 else f"{form(self.printed[0])}–{form(self.printed[1])}, n={self.n}"


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


def _bisect(is_above: Callable[[float], bool]) -> float:
    """Return the smallest point in [0, 1] satisfying a monotone condition."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
