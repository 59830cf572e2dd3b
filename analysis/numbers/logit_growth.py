"""Find the learning rate from which attention's largest logit passes a limit, and its law of sizes.

Wortsman et al. (2023, arXiv:2309.14322, Section 3.3) extrapolate the logit over sizes, at each rate by a quadratic, to
foretell which size diverges there. Over three decades of rates it is no quadratic: flat, then steep. So the rate of
passing is interpolated at each size, and a law of sizes (`size_laws`) extrapolates it. The law of all sizes but the
largest, tried on the largest, is its back-test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from analysis.numbers.alarms import LOGITS, list_rows
from analysis.numbers.size_laws import Law, Size, fit_law
from analysis.numbers.transfer import Group
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study

LIMIT = 1e4  # above it, all of Wortsman et al.'s runs diverged
LATE_ROWS = 5  # last rows of a run, whose median is its value


@dataclass(frozen=True)
class Growth:
    """How one size's largest attention logit grows with the learning rate.

    Attributes:
        size: width, layers, steps, batch; () in a study without sizes.
        series: name in its study.
        table: largest attention logit at the end of training, learning rate × seed; ∞ if diverged.
        log_lr: log10 of the rate at which it passes `LIMIT`, mean over seeds; NaN if it does not.
        error: its standard error in decades, with the sweep's resolution.
        spacing: decades between the rates around it.
        reason: why the rate is unknown; "" if known.
    """

    size: Size
    series: str
    table: Frame
    log_lr: float
    error: float
    spacing: float
    reason: str


@once_per_study
def read_logits(study: Study, series: str) -> Frame:
    """Return the largest attention logit at the end of each run, learning rate × seed; ∞ if diverged."""
    rows = list_rows(study, LOGITS).sort_values("step")
    late = rows.groupby("run_id")["value"].apply(lambda values: values.iloc[-LATE_ROWS:].median())
    runs = study.of(series)
    values = runs["run_id"].map(late).mask(runs["status"] == "diverged", math.inf)
    return runs.assign(value=values).pivot_table(index="lr", columns="seed", values="value", aggfunc="first")


def find_passing(lrs: Iterable[float], values: Iterable[float], limit: float = LIMIT) -> tuple[float, float, str]:
    """Return the log10 LR from which values exceed a limit, the spacing of the rates around it, and why it is unknown.

    The last rate below the limit and the next one enclose it. Between them it is interpolated in logarithms; the middle
    if the upper value is ∞.

    Args:
        lrs: ascending learning rates.
        values: one a rate: ∞ if diverged, NaN without a result.
        limit: the limit.

    Returns:
        NaN, NaN and the reason where it is unknown; the reason is "" otherwise.
    """
    pairs = [(math.log10(x), float(y)) for x, y in zip(lrs, values, strict=True) if not math.isnan(y)]
    below = [place for place, (_, y) in enumerate(pairs) if y <= limit]
    if not pairs:
        return math.nan, math.nan, "not logged"
    if not below:
        return math.nan, math.nan, "above it at every rate"
    if len(below) == len(pairs):
        return math.nan, math.nan, "below it at every rate"
    if below[-1] == len(pairs) - 1:
        return math.nan, math.nan, "above it at some rates, not at the largest"
    (left, low), (right, high) = pairs[below[-1]], pairs[below[-1] + 1]
    share = 0.5 if math.isinf(high) or low <= 0 else math.log(limit / low) / math.log(high / low)
    return left + share * (right - left), right - left, ""


def find_growth(study: Study, series: str, size: Size = ()) -> Growth:
    """Return a series' growth; without a rate of passing if at most half of its seeds have one.

    Args:
        study: the study.
        series: name of the series.
        size: its size; () in a study without sizes.
    """
    table = read_logits(study, series)
    seeds = [find_passing(table.index, table[seed]) for seed in table]
    known = [(rate, spacing) for rate, spacing, reason in seeds if not reason]
    if 2 * len(known) <= len(seeds):
        reason = statistics.mode([reason for *_, reason in seeds if reason] or ["not logged"])
        return Growth(size, series, table, math.nan, math.nan, math.nan, reason)
    rates, spacing = np.array([rate for rate, _ in known]), float(np.mean([each for _, each in known]))
    of_seeds = float(rates.var(ddof=1)) / len(known) if len(known) > 1 else 0.0
    return Growth(size, series, table, float(rates.mean()), math.sqrt(of_seeds + spacing**2 / 12), spacing, "")


def find_growths(group: Group) -> list[Growth]:
    """Return the growth at each size of a group."""
    return [find_growth(curve.study, curve.series, curve.size) for curve in group.curves]


def fit_passing(growths: Iterable[Growth]) -> Law | None:
    """Return the law of the rates of passing; None if one is unknown, or the sizes determine none."""
    several = list(growths)
    if not several or any(each.reason for each in several):
        return None
    spacing = max(each.spacing for each in several)
    return fit_law([each.size for each in several], [each.log_lr for each in several],
                   [each.error for each in several], spacing)  # fmt: skip


@dataclass(frozen=True)
class BackTest:
    """The rate of passing at the largest size: found, and as the law of the smaller ones says."""

    size: Size
    found: float
    said: float
    neighbour: float

    @property
    def error(self) -> float:
        """log10 of the law's rate over the found one."""
        return round(self.said - self.found, 9) + 0.0


def find_back_test(growths: Iterable[Growth]) -> BackTest | None:
    """Return the back-test; None without three sizes on one axis with a known rate."""
    known = sorted((each for each in growths if not each.reason), key=lambda each: each.size)
    law = fit_passing(known[:-1]) if len(known) > 2 else None
    if law is None or len(law.axes) != 1:
        return None
    largest = known[-1]
    return BackTest(largest.size, largest.log_lr, law.predict(largest.size)[0], known[-2].log_lr)
