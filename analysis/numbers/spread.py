"""Give a number its sample size and its interval, and write them as tables, figures and sentences do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

Scale = Literal["real", "positive", "share", "extreme"]
REAL: Scale = "real"  # differences and slopes, of either sign; nats, which are added and lie far from 0
POSITIVE: Scale = "positive"  # norms, ratios, rates: above 0, multiplied
SHARE: Scale = "share"  # between 0 and 1
# the largest or worst of a run: its mean over seeds describes nothing, its smallest and largest value do
EXTREME: Scale = "extreme"

INTERVAL_RULE = "Second line: min–max over the seeds (n = 2) or Student-t 95 % interval of the mean (n ≥ 3)"
INTERVAL_RULES: dict[Scale, str] = {
    REAL: INTERVAL_RULE,
    POSITIVE: (
        "Second line: min–max over the seeds (n = 2, or a value of 0) or 95 % interval of the geometric mean (n ≥ "
        "3), by Student's t on logarithms"
    ),
    SHARE: "Second line: min–max over the seeds (n = 2, or a share of 0 or 1) or 95 % interval (n ≥ 3) by Student's t "
    "on the log-odds",
    EXTREME: "Second line: smallest and largest over the seeds",
}


def t_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; ∞ below one degree of freedom."""
    return float(stdtrit(degrees, 0.975)) if degrees >= 1 else math.inf


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the Student-t 95 % interval of the mean; infinite where fewer than two values are given or one is not
    finite."""
    array = np.asarray(list(values), dtype=float)
    if len(array) < 2 or not np.isfinite(array).all():
        return (-math.inf, math.inf)
    half = t_975(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return (float(array.mean()) - half, float(array.mean()) + half)


def interval(values: Iterable[float], scale: Scale = REAL) -> tuple[float, float]:
    """Return the ends of a 95 % interval over three values or more that cannot leave the quantity's own range; over
    fewer, the smallest and largest.

    ``scale``: "real" takes Student's t on the values (an interval of the mean), "positive" on their logarithms (of the
    geometric mean), "share" on the log-odds (Student's interval on a transformed scale, back-transformed: Bland and
    Altman 1996, BMJ 312:1079; Brown, Cai and DasGupta 2001 for shares). A Student interval of three heavy-tailed
    positive values easily passes 0, where none of them can lie. Where a value stands at the scale's end (a norm of 0, a
    share of 0 or 1; beyond it by rounding, as an eigenvalue of 0 does) it has no finite transform, and "extreme", the
    largest of many tokens, has no mean worth estimating from a few seeds: for both it is the smallest and largest.
    """
    array = np.asarray(list(values), dtype=float)
    lower, upper = {REAL: (-math.inf, math.inf), SHARE: (0.0, 1.0)}.get(
        scale, (0.0 if scale == POSITIVE else -math.inf, math.inf)
    )
    if not len(array):
        return (-math.inf, math.inf)
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
    """A median with its n and an interval: min–max for two values, for three or more a 95 % one on the quantity's
    `Scale` (see `interval`), none for one."""

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(values: Iterable[float], scale: Scale = REAL) -> Spread:
        """Return the spread over the finite values only; n = 0 and NaN where there is none."""
        finite = np.asarray([value for value in values if math.isfinite(value)], dtype=float)
        if len(finite) == 0:
            return Spread(math.nan, math.nan, math.nan, 0)
        return Spread(float(np.median(finite)), *interval(finite, scale), len(finite))

    def detail(self, form=lambda value: f"{value:.3f}") -> str:
        """Say what stands under the median: the interval and n, or n alone."""
        return f"n={self.n}" if self.n < 2 else f"{form(self.low)}–{form(self.high)}, n={self.n}"


MOST_SEEDS = 100


def seeds_needed(differences: Sequence[float], margin: float = math.nan) -> int | None:
    """Return the smallest number of seeds whose Student-t 95 % interval, at the observed mean and spread of paired
    differences, excludes 0 or, with a ``margin``, lies below it. None: more than `MOST_SEEDS`, or no number would do.
    Fewer than two differences have no spread: None."""
    values = np.asarray(differences, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    room = abs(mean) if math.isnan(margin) else margin - mean
    return next((n for n in range(3, MOST_SEEDS + 1) if room > t_975(n - 1) * deviation / math.sqrt(n)), None)


def share_interval(hits: int, number: int) -> tuple[float, float]:
    """Return the exact (Clopper–Pearson) 95 % interval of a share of which ``hits`` of ``number`` independent draws
    were seen, by bisection of binomial tails."""
    assert 0 <= hits <= number and number > 0

    def at_least(share: float) -> float:  # P(X ≥ hits), rising in the share
        return math.fsum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(hits, number + 1))

    def at_most(share: float) -> float:  # P(X ≤ hits), falling
        return math.fsum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(hits + 1))

    low = 0.0 if hits == 0 else _bisect(lambda share: at_least(share) > 0.025)
    high = 1.0 if hits == number else _bisect(lambda share: at_most(share) <= 0.025)
    return low, high


def _bisect(is_above: Callable[[float], bool]) -> float:
    """Return the point of [0, 1] from which on a condition holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
