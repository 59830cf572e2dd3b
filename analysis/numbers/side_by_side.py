"""Compute ratios of throughput from turns that were taken side by side (`benchmarks.throughput`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.study.load import Study

FEWEST_TURNS = 6  # of fewer no 95 % interval of a median can be had


@dataclass(frozen=True)
class Ratio:
    """Throughput of one series over another's in turns taken side by side: the median, and its 95 % interval without
    any distribution assumed (order statistics, by the binomial law of how many turns lie below the median); (0, ∞) of
    fewer than six turns."""

    median: float
    low: float
    high: float
    turns: int


def ratio(study: Study, series: str, plain: str) -> Ratio | None:
    """Return the throughput of one series over another's, measured side by side; None where one was not."""
    seconds = {row["series"]: row["seconds"] for row in study.throughput.get("rows", [])}
    if not {series, plain} <= set(seconds):
        return None
    rates = {row["series"]: row["tokens_per_step"] for row in study.throughput["rows"]}
    turns = np.sort(np.asarray(seconds[plain]) / np.asarray(seconds[series]) * rates[series] / rates[plain])
    place = _place(len(turns))
    low, high = (0.0, math.inf) if place is None else (turns[place], turns[-1 - place])
    return Ratio(float(np.median(turns)), float(low), float(high), len(turns))


def mean_time(study: Study, series: str, plain: str) -> float:
    """Return the mean time of a step of one series over another's, measured side by side: the mean, since some do their
    work every few steps. NaN where one was not measured."""
    seconds = {row["series"]: row["seconds"] for row in study.throughput.get("rows", [])}
    if not {series, plain} <= set(seconds):
        return math.nan
    return float(np.mean(seconds[series]) / np.mean(seconds[plain]))


def _place(num: int) -> int | None:
    """Return the largest k with P(fewer than k + 1 of ``num`` fair coins) ≤ 0.025: between the k-th and the (n − 1 −
    k)-th of the sorted values, counted from 0, the median lies with at least 95 %."""
    below, place = 0.0, None
    for k in range(num // 2):
        below += math.comb(num, k) / 2**num
        if below > 0.025:
            break
        place = k
    return place
