"""Compute stable windows: learning rates with an NLL within 5 % of the best.

If the best is less than 10 % below the token-frequency NLL, then 5 % is more than half the learning. On DNA this is the
case (1.386 nats, good models 1.22 to 1.36). Such a window is lenient, and reports must say so.

A window is contiguous around the best rate. Edges are interpolated linearly in log10 LR against NLL, between the last
rate inside and the first outside. Three kinds of neighbour allow no interpolation. The edge is then the last measured
rate inside:

- `open`: the grid ends. The window may continue without limit, so its width is a lower bound.
- `unmeasured`: the neighbour failed or never ran. Same as open: a crash is no evidence for instability.
- `diverged`: the neighbour diverged. The true edge lies between both rates, so the width has lower and upper bounds.
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
HALF = 0.5  # share of the nats between the token-frequency NLL and the best NLL
VALIDATION, GENERATIVE = "val_nll", "gen_nll"
Kind = Literal["interpolated", "open", "unmeasured", "diverged"]


@dataclass(frozen=True)
class Edge:
    """One end of a window.

    Attributes:
        lr: reported rate.
        kind: reason for the end.
        furthest_lr: furthest possible rate for the true edge (0 or ∞: unknown).
    """

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
    half_nll: float | None = None  # NLL with half the learning beyond token frequencies lost; None if unknown

    @property
    def is_lenient(self) -> bool:
        """Whether rates losing more than half the learning count as stable."""
        return self.half_nll is not None and self.threshold_nll > self.half_nll

    @property
    def width(self) -> float:
        """Decades between the reported edges, a lower bound on the true width."""
        return math.log10(self.high.lr / self.low.lr)

    @property
    def width_max(self) -> float:
        """Largest possible width of the true window in decades. ∞ if an edge is open or unmeasured."""
        if self.low.furthest_lr == 0 or math.isinf(self.high.furthest_lr):
            return math.inf
        return math.log10(self.high.furthest_lr / self.low.furthest_lr)

    @property
    def width_max_in_grid(self) -> float:
        """Largest possible width within the swept range, in decades."""
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
        """Whether the window reaches both ends of the sweep."""
        return self.low.kind == "open" and self.high.kind == "open"


def window(lrs, nlls, tolerance: float = TOLERANCE, unigram: float = math.nan) -> Window | None:
    """Return the stable window of one curve; None without a finite run.

    The tolerance is relative to the best NLL's magnitude, so negative NLLs (densities) work too.

    Args:
        lrs: distinct learning rates, in any order.
        nlls: NLL (nats) per rate; ``inf`` if diverged, ``nan`` without a result.
        tolerance: allowed relative excess over the best.
        unigram: token-frequency NLL; NaN if unknown or not comparable.
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
    """Walk outwards from the best rate to the first one outside."""
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
    """Return a run's NLL for windows and medians: ∞ if diverged, NaN without a result.

    Failed and unfinished runs have no result. A finished run without a finite validation NLL counts as diverged;
    without a generative NLL, as not scored.
    """
    if run.status == "diverged":
        return math.inf
    value = float(getattr(run, column))
    if run.status not in FINISHED:
        return math.nan
    return value if math.isfinite(value) else math.inf if column == VALIDATION else math.nan


def by_rate_and_seed(runs: Frame, values: Sequence[float] | Column, of_several: Literal["median", "first"]) -> Frame:
    """Return a table, learning rate × seed, both sorted, with one number per run.

    Args:
        runs: columns ``lr`` and ``seed``.
        values: one number per row in ``runs``.
        of_several: reduction for runs with equal rate and seed; NaN is skipped.

    Returns:
        NaN for missing runs.
    """
    numbers = np.asarray(values, dtype=float)
    (rates, row), (seeds, column) = (np.unique(runs[name].to_numpy(), return_inverse=True) for name in ("lr", "seed"))
    table = np.full((len(rates), len(seeds)), math.nan)
    table[row, column] = numbers
    # DataFrame.pivot_table is twenty times slower if every run has its own cell, as in a sweep
    if len(np.unique(row * len(seeds) + column)) < len(numbers):
        frame = pd.DataFrame({"row": row, "column": column, "value": numbers})
        cells = frame.groupby(["row", "column"])["value"].agg(of_several)
        table[cells.index.get_level_values(0), cells.index.get_level_values(1)] = cells
    return pd.DataFrame(table, index=pd.Index(rates, name="lr"), columns=pd.Index(seeds, name="seed"))


@once_per_study
def outcomes(study: Study, series: str, column: str = VALIDATION) -> Frame:
    """Return a table, LR × seed, with each run's `outcome`.

    Args:
        study: supplies the runs.
        series: name of the series.
        column: NLL column.

    Returns:
        NaN for runs missing from the sweep.
    """
    runs = study.of(series)
    needed = runs[["lr", "seed", "status", column]]
    return by_rate_and_seed(needed, [outcome(run, column) for run in needed.itertuples(index=False)], "median")


def median_line(table: Frame) -> Column:
    """Return the median over seeds at each LR.

    A divergence counts as ∞, so an LR with half the seeds diverged lies outside every window.
    """
    rows = [row[~np.isnan(row)] for row in table.to_numpy(dtype=float)]
    return pd.Series([float(np.median(row)) if len(row) else math.nan for row in rows], index=table.index)


@dataclass(frozen=True)
class SeriesWindows:
    """The window of a series' median line, and one per seed (None without a finite run)."""

    series: str
    median: Window | None
    by_seed: dict[int, Window | None]

    @property
    def seed_widths(self) -> tuple[float, ...]:
        return tuple(each.width for each in self.by_seed.values() if each is not None)


@once_per_study
def windows(study: Study, tolerance: float = TOLERANCE, column: str = VALIDATION) -> dict[str, SeriesWindows]:
    """Return every series' windows, in the study's order.

    Args:
        study: supplies the runs.
        tolerance: allowed relative excess over the best.
        column: validation or generative NLL; the latter has no token-frequency NLL.
    """
    result = {}
    for series in study.series:
        table = outcomes(study, series, column)
        line = median_line(table)
        unigram = float(study.of(series)["unigram_nll"].median()) if column == VALIDATION else math.nan
        # A seed without results is no evidence and is left out; a seed with divergences alone keeps its None.
        by_seed = {
            int(s): window(table.index, table[s], tolerance, unigram) for s in table.columns if table[s].notna().any()
        }
        result[series] = SeriesWindows(series, window(line.index, line, tolerance, unigram), by_seed)
    return result


KEPT = 0.95  # fraction of the best share still inside a window
RECALL = "recall"  # the objective judged by its answers


def compares_recall(study: Study) -> bool:
    """Return whether every run is judged by its answers."""
    return not study.is_search and set(study.runs["objective"]) == {RECALL}


def shortfalls(study: Study, series: str, column: str) -> Frame:
    """Return a table, LR × seed, with each run's negated share: less is better.

    ∞ if diverged, NaN without a result.

    Args:
        study: supplies the runs.
        series: name of the series.
        column: share column.
    """
    return outcomes(study, series, column).map(lambda share: share if share == float("inf") else -share)


def share_windows(study: Study, column: str) -> dict[str, SeriesWindows]:
    """Return every series' windows on the share in ``column``, in the study's order.

    As `analysis.numbers.windows.windows`, but ``best_nll`` and ``threshold_nll`` are negated shares.
    """
    found = {}
    for series in study.series:
        table = shortfalls(study, series, column)
        line = median_line(table)
        by_seed = {
            int(seed): window(table.index, table[seed], 1 - KEPT) for seed in table.columns if table[seed].notna().any()
        }
        found[series] = SeriesWindows(series, window(line.index, line, 1 - KEPT), by_seed)
    return found
