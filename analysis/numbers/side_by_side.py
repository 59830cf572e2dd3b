"""Compute throughput ratios from turns measured side by side (`benchmarks.throughput`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.numbers.spread import p_of_share
from analysis.study.load import Study

FEWEST_TURNS = 6  # fewer allow no 95 % interval of a median


@dataclass(frozen=True)
class Ratio:
    """Median throughput ratio of two series over turns, with a distribution-free 95 % interval.

    The interval uses order statistics and the binomial law for turns below the median. (0, ∞) below six turns.
    """

    median: float
    low: float
    high: float
    ratios: tuple[float, ...]

    @property
    def turns(self) -> int:
        return len(self.ratios)

    def p_beyond(self, limit: float) -> float:
        """Return the sign test's two-sided p-value of a median other than ``limit``; turns equal to it are left out."""
        above, below = (sum(sign * (turn - limit) > 0 for turn in self.ratios) for sign in (1, -1))
        return p_of_share(above, above + below) if above + below else 1.0


def ratio(study: Study, series: str, plain: str) -> Ratio | None:
    """Return one series' throughput over another's, side by side; None if not measured.

    Args:
        study: supplies the turns.
        series: numerator.
        plain: denominator.
    """
    seconds = {row["series"]: row["seconds"] for row in study.throughput.get("rows", [])}
    if not {series, plain} <= set(seconds):
        return None
    rates = {row["series"]: row["tokens_per_step"] for row in study.throughput["rows"]}
    turns = np.sort(np.asarray(seconds[plain]) / np.asarray(seconds[series]) * rates[series] / rates[plain])
    place = _place(len(turns))
    low, high = (0.0, math.inf) if place is None else (turns[place], turns[-1 - place])
    return Ratio(float(np.median(turns)), float(low), float(high), tuple(map(float, turns)))


def mean_time(study: Study, series: str, plain: str) -> float:
    """Return one series' mean step time over another's, side by side; NaN if not measured.

    Means, not medians: some optimizers do their work every few steps.

    Args:
        study: supplies the turns.
        series: numerator.
        plain: denominator.
    """
    seconds = {row["series"]: row["seconds"] for row in study.throughput.get("rows", [])}
    if not {series, plain} <= set(seconds):
        return math.nan
    return float(np.mean(seconds[series]) / np.mean(seconds[plain]))


def _place(num: int) -> int | None:
    """Return the largest k with P(fewer than k + 1 of ``num`` fair coins) ≤ 0.025, or None.

    The k-th and (n − 1 − k)-th sorted values, counted from 0, enclose the median with at least 95 %.
    """
    below, place = 0.0, None
    for k in range(num // 2):
        below += math.comb(num, k) / 2**num
        if below > 0.025:
            break
        place = k
    return place
