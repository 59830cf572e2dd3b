"""Compute the stable window: the learning rates around the best one whose NLL is within 5 % of it.

Where a model's best lies less than 10 % below the token-frequency NLL, as on DNA (1.386 nats, good models 1.22 to
1.36), 5 % of it are more than half of what was learned beyond token frequencies: such a window is lenient, and whoever
shows it says so.

Edges. Between the last rate inside and the first outside the edge is interpolated linearly in log10 LR against NLL.
Three neighbours allow no interpolation, and the edge is then the last rate that was measured inside:

- the grid ends (`open`): the window may go on without limit, its width is a lower bound;
- nobody measured the neighbour, because it failed or never ran (`unmeasured`): the same, a crash being no evidence of
  instability;
- the neighbour diverged (`diverged`): the true edge lies between the two rates, so the width has a lower and an upper
  bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from analysis.study.load import FINISHED, Column, Frame, Study
from analysis.study.once import once_per_study

TOLERANCE = 0.05
HALF = 0.5  # of the nats between the token-frequency NLL and the best NLL
VALIDATION, GENERATIVE = "val_nll", "gen_nll"
Kind = Literal["interpolated", "open", "unmeasured", "diverged"]


@dataclass(frozen=True)
class Edge:
    """One end of a window: the rate reported, why it ends there, and the furthest rate at which the true edge can lie
    (0 or ∞: unknown)."""

    lr: float
    kind: Kind
    furthest_lr: float


@dataclass(frozen=True)
class Window:
    """A contiguous range of learning rates around the best one; widths in decades."""

    low: Edge
    high: Edge
    best_lr: float
    best_nll: float
    threshold_nll: float
    grid: tuple[float, float]
    half_nll: float | None = None  # where half of what was learned beyond token frequencies is lost; None: not known

    @property
    def is_lenient(self) -> bool:
        """Whether rates count as stable at which more than half of what was learned is lost."""
        return self.half_nll is not None and self.threshold_nll > self.half_nll

    @property
    def width(self) -> float:
        """Decades between the reported edges: never more than was shown."""
        return math.log10(self.high.lr / self.low.lr)

    @property
    def width_max(self) -> float:
        """The widest that the true window can be: ∞ where an edge is open or unmeasured."""
        if self.low.furthest_lr == 0 or math.isinf(self.high.furthest_lr):
            return math.inf
        return math.log10(self.high.furthest_lr / self.low.furthest_lr)

    @property
    def width_max_in_grid(self) -> float:
        """The widest that its part within the swept range can be."""
        low, high = max(self.low.furthest_lr, self.grid[0]), min(self.high.furthest_lr, self.grid[1])
        return math.log10(high / low)

    @property
    def open_low(self) -> bool:
        return self.low.kind in ("open", "unmeasured")

    @property
    def open_high(self) -> bool:
        return self.high.kind in ("open", "unmeasured")

    @property
    def fills_grid(self) -> bool:
        """Open at both ends of the sweep."""
        return self.low.kind == "open" and self.high.kind == "open"


def window(lrs, nlls, tolerance: float = TOLERANCE, unigram: float = math.nan) -> Window | None:
    """Return the stable window of one curve. ``unigram``: the token-frequency NLL; NaN: not known, or no measure of
    these NLLs.

    ``lrs``: learning rates, each once, in any order. ``nlls``: one NLL (nats) for each, ``inf`` where the run diverged,
    ``nan`` where there is no result. None where no run is finite. "Within 5 %" is taken of the best NLL's magnitude, so
    that a negative NLL (a density) works too.
    """
    order = np.argsort(np.asarray(lrs, dtype=float))
    x, y = np.asarray(lrs, dtype=float)[order], np.asarray(nlls, dtype=float)[order]
    y = np.where(np.isneginf(y), np.nan, y)
    if not np.isfinite(y).any():
        return None
    best = int(np.nanargmin(y))
    threshold = float(y[best] + tolerance * abs(y[best]))
    return Window(
        low=_edge(x, y, best, threshold, -1),
        high=_edge(x, y, best, threshold, +1),
        best_lr=float(x[best]),
        best_nll=float(y[best]),
        threshold_nll=threshold,
        grid=(float(x[0]), float(x[-1])),
        half_nll=float(y[best] + HALF * (unigram - y[best])) if unigram > y[best] else None,
    )


def _edge(x: np.ndarray, y: np.ndarray, best: int, threshold: float, step: int) -> Edge:
    """Walk from the best rate outwards until the first one that is not inside."""
    unknown = math.inf if step > 0 else 0.0
    inside, outside = best, best + step
    while 0 <= outside < len(x) and y[outside] <= threshold:
        inside, outside = outside, outside + step
    if not 0 <= outside < len(x):
        return Edge(float(x[inside]), "open", unknown)
    if np.isnan(y[outside]):
        return Edge(float(x[inside]), "unmeasured", unknown)
    if np.isinf(y[outside]):
        return Edge(float(x[inside]), "diverged", float(x[outside]))
    share = (threshold - y[inside]) / (y[outside] - y[inside])
    lr = float(10 ** (np.log10(x[inside]) + share * (np.log10(x[outside]) - np.log10(x[inside]))))
    return Edge(lr, "interpolated", lr)


def outcome(run, column: str = VALIDATION) -> float:
    """Return a run's NLL as windows and medians count it: ∞ for a divergence, NaN where there is no result yet or a
    crash took it.

    A finished run without a finite validation NLL counts as diverged; without a generative one it was not scored.
    """
    if run.status == "diverged":
        return math.inf
    value = float(getattr(run, column))
    if run.status not in FINISHED:
        return math.nan
    return value if math.isfinite(value) else math.inf if column == VALIDATION else math.nan


def by_rate_and_seed(runs: Frame, values: Sequence[float] | Column, of_several: Literal["median", "first"]) -> Frame:
    """Return a table, learning rate × seed, both sorted, of one number per run; NaN where no run has both.

    Args:
        runs: columns ``lr`` and ``seed``.
        values: a number for each row of ``runs``.
        of_several: what counts of several runs of one rate and seed, NaN left out.
    """
    numbers = np.asarray(values, dtype=float)
    (rates, row), (seeds, column) = (np.unique(runs[name].to_numpy(), return_inverse=True) for name in ("lr", "seed"))
    table = np.full((len(rates), len(seeds)), math.nan)
    table[row, column] = numbers
    # DataFrame.pivot_table takes twenty times as long where every run has its own cell, as in a sweep
    if len(np.unique(row * len(seeds) + column)) < len(numbers):
        frame = pd.DataFrame({"row": row, "column": column, "value": numbers})
        cells = frame.groupby(["row", "column"])["value"].agg(of_several)
        table[cells.index.get_level_values(0), cells.index.get_level_values(1)] = cells
    return pd.DataFrame(table, index=pd.Index(rates, name="lr"), columns=pd.Index(seeds, name="seed"))


@once_per_study
def outcomes(study: Study, series: str, column: str = VALIDATION) -> Frame:
    """Return a table, LR × seed, of each run's `outcome`; NaN where the sweep has no such run."""
    runs = study.of(series)
    needed = runs[["lr", "seed", "status", column]]
    return by_rate_and_seed(needed, [outcome(run, column) for run in needed.itertuples(index=False)], "median")


def median_line(table: Frame) -> Column:
    """Return the median over seeds at each LR. A divergence counts as ∞, so an LR at which half of the seeds diverged
    lies outside every window."""
    rows = [row[~np.isnan(row)] for row in table.to_numpy(dtype=float)]
    return pd.Series([float(np.median(row)) if len(row) else math.nan for row in rows], index=table.index)


@dataclass(frozen=True)
class SeriesWindows:
    """The window of one series' median line, and one window for each seed (None where no run of that seed is
    finite)."""

    series: str
    median: Window | None
    by_seed: dict[int, Window | None]

    @property
    def seed_widths(self) -> tuple[float, ...]:
        return tuple(each.width for each in self.by_seed.values() if each is not None)


@once_per_study
def windows(study: Study, tolerance: float = TOLERANCE, column: str = VALIDATION) -> dict[str, SeriesWindows]:
    """Return the windows of every series of a study, in the study's order, on the validation NLL or the generative one
    (which no token-frequency NLL belongs to)."""
    result = {}
    for series in study.series:
        table = outcomes(study, series, column)
        line = median_line(table)
        unigram = float(study.of(series)["unigram_nll"].median()) if column == VALIDATION else math.nan
        # A seed without any result is no evidence either way; one whose runs all diverged is, and keeps its None.
        by_seed = {
            int(s): window(table.index, table[s], tolerance, unigram) for s in table.columns if table[s].notna().any()
        }
        result[series] = SeriesWindows(series, window(line.index, line, tolerance, unigram), by_seed)
    return result


KEPT = 0.95  # of the best share
RECALL = "recall"  # the objective that is judged by its answers


def compares_recall(study: Study) -> bool:
    """Return whether every run of a study is judged by its answers."""
    return not study.is_search and set(study.runs["objective"]) == {RECALL}


def shortfalls(study: Study, series: str, column: str) -> Frame:
    """Return a table, LR × seed, of each run's share with its sign turned, so that less is better as of an NLL: ∞ where
    the run diverged, NaN where there is no result."""
    return outcomes(study, series, column).map(lambda share: share if share == float("inf") else -share)


def share_windows(study: Study, column: str) -> dict[str, SeriesWindows]:
    """Return the windows of every series of a study, in the study's order, on the share in ``column``; as
    `analysis.numbers.windows.windows` on the NLL, whose ``best_nll`` and ``threshold_nll`` are the negative of a share
    here."""
    found = {}
    for series in study.series:
        table = shortfalls(study, series, column)
        line = median_line(table)
        by_seed = {
            int(seed): window(table.index, table[seed], 1 - KEPT) for seed in table.columns if table[seed].notna().any()
        }
        found[series] = SeriesWindows(series, window(line.index, line, 1 - KEPT), by_seed)
    return found
