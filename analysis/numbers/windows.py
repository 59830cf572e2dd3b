"""Compute stable windows: learning rates with an NLL within 5 % of the best.

If the best is less than 10 % below the token-frequency NLL, then 5 % is more than half the learning. On DNA this is the
case (1.386 nats, good models 1.22 to 1.36). The window then ends where half of the learning is lost; the rates beyond,
up to 5 %, are drawn pale and not counted.

A window is contiguous around the best rate. Each edge has a bracket: the last rate inside and the first outside. It is
interpolated linearly in log10 LR against NLL between both. Three kinds of neighbour allow no interpolation. The edge is
then the last measured rate inside:

- `open`: the grid ends. The window may continue without limit, so its width is a lower bound.
- `unmeasured`: the neighbour failed or never ran. Same as open: a crash is no evidence for instability.
- `diverged`: the neighbour diverged. The true edge lies between both rates, so the width has lower and upper bounds.

A window below another series' limit may be empty (`none`): no rate reaches the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from analysis.study.load import HAS_RESULT, PENDING, Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.study.reference import unlearned

TOLERANCE = 0.05
HALF = 0.5  # share of the nats between the token-frequency NLL and the best NLL
VALIDATION, GENERATIVE = "val_nll", "gen_nll"
NLL_NAMES = {VALIDATION: "validation NLL", GENERATIVE: "generative NLL"}
Kind = Literal["interpolated", "open", "unmeasured", "diverged", "none"]


@dataclass(frozen=True)
class Edge:
    """One end of a window.

    Attributes:
        lr: reported rate.
        kind: reason for the end.
        inside_lr: last rate inside.
        outside_lr: first rate outside (0 or ∞: unknown).
    """

    lr: float
    kind: Kind
    inside_lr: float
    outside_lr: float

    @property
    def furthest_lr(self) -> float:
        """Furthest possible rate for the edge if interpolation is trusted."""
        return self.lr if self.kind == "interpolated" else self.outside_lr

    @property
    def bracket_decades(self) -> float:
        """Decades between the last rate inside and the first outside; ∞ if unknown."""
        return _decades(*sorted((self.inside_lr, self.outside_lr)))


@dataclass(frozen=True)
class Window:
    """A contiguous range of learning rates around the best one; widths in decades.

    Attributes:
        low, high: ends.
        best_lr, best_nll: best rate and its NLL.
        threshold_nll: largest NLL inside.
        within_nll: the same without the limit at half the learning.
        grid: smallest and largest swept rate.
        uncounted: both edges' rates without the limit at half the learning.
    """

    low: Edge
    high: Edge
    best_lr: float
    best_nll: float
    threshold_nll: float
    within_nll: float
    grid: tuple[float, float]
    uncounted: tuple[float, float]

    @property
    def keeps_half(self) -> bool:
        """Whether half of the learning is the limit that acts: it allows less than 5 %."""
        return self.threshold_nll < self.within_nll

    @property
    def is_capped(self) -> bool:
        """Whether rates within 5 % are left out because they lost half of the learning."""
        return self.uncounted != (self.low.lr, self.high.lr)

    @property
    def has_one_rate(self) -> bool:
        """Whether a single rate was swept, which makes no window."""
        return self.grid[0] == self.grid[1]

    @property
    def is_empty(self) -> bool:
        """Whether no rate reaches the limit."""
        return self.low.kind == "none"

    @property
    def width(self) -> float:
        """Decades between the reported edges, a lower bound on the true width."""
        return _decades(self.low.lr, self.high.lr)

    @property
    def width_max(self) -> float:
        """Largest possible width in decades if interpolation is trusted. ∞ if an edge is open or unmeasured."""
        return _decades(self.low.furthest_lr, self.high.furthest_lr)

    @property
    def width_max_in_grid(self) -> float:
        """As `width_max`, within the swept range."""
        return self._cut_to_grid(self.low.furthest_lr, self.high.furthest_lr)

    @property
    def bracket(self) -> tuple[float, float]:
        """Smallest and largest width that the measured rates allow, without interpolation; decades."""
        return (
            _decades(self.low.inside_lr, self.high.inside_lr),
            _decades(self.low.outside_lr, self.high.outside_lr),
        )

    @property
    def bracket_in_grid(self) -> tuple[float, float]:
        """As `bracket`, within the swept range."""
        return self.bracket[0], self._cut_to_grid(self.low.outside_lr, self.high.outside_lr)

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

    def _cut_to_grid(self, low: float, high: float) -> float:
        return _decades(max(low, self.grid[0]), min(high, self.grid[1]))


def _decades(low: float, high: float) -> float:
    """Return log10(high / low); ∞ if an end is unknown (0 or ∞)."""
    return math.inf if low == 0 or math.isinf(high) else math.log10(high / low)


def window(
    lrs, nlls, tolerance: float = TOLERANCE, unigram: float = math.nan, limit: float = math.nan
) -> Window | None:
    """Return the stable window of one curve; None without a finite run.

    The tolerance is relative to the best NLL's magnitude, so negative NLLs (densities) work too.

    Args:
        lrs: distinct learning rates, in any order.
        nlls: NLL (nats) per rate; ``inf`` if diverged, ``nan`` without a result.
        tolerance: allowed relative excess over the best.
        unigram: token-frequency NLL; NaN if unknown or not comparable. The window ends at half the learning beyond it.
        limit: largest NLL inside, e.g. another curve's; NaN: the curve's own, by tolerance and unigram.
    """
    order = np.argsort(np.asarray(lrs, dtype=float))
    x, y = np.asarray(lrs, dtype=float)[order], np.asarray(nlls, dtype=float)[order]
    y = np.where(np.isneginf(y), np.nan, y)
    if not np.isfinite(y).any():
        return None
    best = int(np.nanargmin(y))
    within = float(y[best] + tolerance * abs(y[best])) if math.isnan(limit) else limit
    half = float(y[best] + HALF * (unigram - y[best])) if math.isnan(limit) and unigram > y[best] else math.inf
    threshold = min(within, half)
    low, high = (_edge(x, y, best, threshold, step) for step in (-1, +1))
    wider = (low, high) if threshold == within else tuple(_edge(x, y, best, within, step) for step in (-1, +1))
    return Window(
        low=low,
        high=high,
        best_lr=float(x[best]),
        best_nll=float(y[best]),
        threshold_nll=threshold,
        within_nll=within,
        grid=(float(x[0]), float(x[-1])),
        uncounted=(wider[0].lr, wider[1].lr),
    )


def _edge(x: np.ndarray, y: np.ndarray, best: int, threshold: float, step: int) -> Edge:
    """Walk outwards from the best rate to the first one outside."""
    unknown = math.inf if step > 0 else 0.0
    inside, outside = best, best + step
    if y[best] > threshold:
        return Edge(float(x[best]), "none", float(x[best]), float(x[best]))
    while 0 <= outside < len(x) and y[outside] <= threshold:
        inside, outside = outside, outside + step
    last = float(x[inside])
    if not 0 <= outside < len(x):
        return Edge(last, "open", last, unknown)
    first = float(x[outside])
    if np.isnan(y[outside]):
        return Edge(last, "unmeasured", last, unknown)
    if np.isinf(y[outside]):
        return Edge(last, "diverged", last, first)
    share = (threshold - y[inside]) / (y[outside] - y[inside])
    lr = float(10 ** (np.log10(x[inside]) + share * (np.log10(x[outside]) - np.log10(x[inside]))))
    return Edge(lr, "interpolated", last, first)


def outcome(run, column: str = VALIDATION) -> float:
    """Return a run's NLL for windows and medians: ∞ if diverged, NaN without a result.

    Failed and unfinished runs have no result. A finished run without a finite validation NLL counts as diverged;
    without a generative NLL, as not scored.
    """
    if run.status == "diverged":
        return math.inf
    value = float(getattr(run, column))
    if run.status not in HAS_RESULT:
        return math.nan
    return value if math.isfinite(value) else math.inf if column == VALIDATION else math.nan


NOT_RUN = "not run yet"


def explain_absence(runs: Frame, column: str = VALIDATION) -> str:
    """Say why runs have no finite median NLL at any learning rate, e.g. "not run yet".

    Args:
        runs: those of a series or of a study, with their status.
        column: the NLL, or a share.
    """
    statuses = set(runs["status"])
    if statuses <= {"queued"}:
        return NOT_RUN
    if statuses <= set(PENDING):
        return "no run has ended yet"
    if len(statuses) == 1 and statuses <= {"diverged", "failed"}:
        return f"every run {statuses.pop()}"
    ends = [outcome(run, column) for run in runs.itertuples(index=False)]
    if any(math.isfinite(end) for end in ends):
        return "half of the runs or more diverged at every rate"
    if math.inf in ends:
        return "every run with a result diverged"
    return "no run has a result" if column == VALIDATION else "no run was scored"


def tabulate(runs: Frame, values: Sequence[float] | Column, of_several: Literal["median", "first"]) -> Frame:
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
    return tabulate(needed, [outcome(run, column) for run in needed.itertuples(index=False)], "median")


def is_any_finite(tables: Iterable[Frame]) -> bool:
    """Return whether some run in tables of `outcomes` has a finite number."""
    return any(np.isfinite(table.to_numpy(dtype=float)).any() for table in tables)


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

    @property
    def keeps_half(self) -> bool:
        """Whether half of the learning is the limit that acts in every seed with a window."""
        known = [each.keeps_half for each in self.by_seed.values() if each is not None]
        return bool(known) and all(known)


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
        unigram = unlearned(study, series).nll if column == VALIDATION else math.nan
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
