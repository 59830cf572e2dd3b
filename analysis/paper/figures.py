"""Draw the consensus paper's Figures 2 to 6 as grids, modality by size.

One column per modality, one row per size. Figures 2 to 5: NLL against learning rate on a log axis and, beneath, on a
linear one from the last rate within every mechanism's window. Figure 6: α_max against learning rate, with the
training's rate in red dashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from analysis.drawing.marks import TRAINING, entry, mark_entry
from analysis.drawing.style import LEGEND_ROW, MUTED, WIDTH_INCHES, Look, fitting_legend, looks, lr_axis
from analysis.drawing.tables import chunks
from analysis.numbers.step_shares import DIVERGED, count_stable_steps, finite_median, phases_and_states, recorded_steps
from analysis.numbers.windows import VALIDATION, is_any_finite, outcomes, windows
from analysis.paper.grid import Block, group_by_modality, join_runs
from analysis.sections.nll_figures import nll_extras, nll_limits, nll_line, top_marks
from analysis.study.load import Frame, Study
from analysis.study.reference import frequency_nll
from analysis.words import lr_text

COLUMNS, ROWS, LEGEND_COLUMNS = 3, 3, 6  # per page
HEIGHT = 2.35  # inches of a row
FEWEST_ZOOMED, MOST_TICKS = 3, 3
Tables = dict[str, Frame]
NLL_CAPTION = (
    "{what} against learning rate, a column for each modality, a row for each size, as the consensus paper's Figures 2 "
    "to 5: on a log axis and, beneath, on a linear one from the last rate on at which every mechanism lies within its "
    "stable window, three at the least. Points: seeds; line: their median, broken where half of them or more diverged; "
    "×: diverged runs of all runs there. Each panel has a scale of its own."
)


def nll_grids(blocks: Sequence[Block], column: str = VALIDATION) -> list[Figure]:
    """Draw the grid, several figures beyond three modalities or sizes; none without a finite NLL at several rates."""
    shown = [block for block in blocks if column == VALIDATION or is_any_finite(_tables(block.study, column).values())]
    lines = (block for block in shown if block.study.runs["lr"].nunique() > 1)
    if not any(is_any_finite(_tables(block.study, column).values()) for block in lines):
        return []
    styles = looks(join_runs(shown))
    return [_figure(columns, column, styles) for columns in _pages(shown)]


def _pages(blocks: Sequence[Block]) -> Iterator[list[list[Block]]]:
    """Yield each figure's columns: one modality's places from top to bottom."""
    columns = group_by_modality(blocks)
    for names in chunks(list(columns), COLUMNS):
        for start in range(0, max(len(columns[name]) for name in names), ROWS):
            yield [part for name in names if (part := columns[name][start : start + ROWS])]


def _tables(study: Study, column: str) -> Tables:
    return {name: outcomes(study, name, column) for name in study.series}


def _figure(columns: Sequence[Sequence[Block]], column: str, styles: dict[str, Look]) -> Figure:
    """Draw one figure; ``columns`` are modalities with their places from top to bottom."""
    depth, extras = max(map(len, columns)), {}
    share = 1.0 if len(columns) > 1 else 0.62
    zoomed = any(zoom(block.study, column) for places in columns for block in places)
    figure = Figure(
        figsize=(WIDTH_INCHES * share, 0.5 + (1.0 if zoomed else 0.6) * HEIGHT * depth), layout="constrained"
    )
    heights = (1.25, 1.0 if zoomed else 0.01)
    grid: Any = figure.subplots(2 * depth, len(columns), squeeze=False, height_ratios=heights * depth)
    for line, place in np.ndindex(depth, len(columns)):
        pair: tuple[Axes, Axes] = (grid[2 * line, place], grid[2 * line + 1, place])
        if line < len(columns[place]):
            width = 0.8 * WIDTH_INCHES * share / len(columns)
            extras |= _draw_place(pair, columns[place][line], column, styles, width)
            pair[1 if zoomed else 0].set_xlabel("learning rate")
        else:
            for ax in pair:
                ax.remove()
    for ax in grid[:, 0]:
        ax.set_ylabel("NLL (nats)")
    grid_legend(figure, columns, styles, extras.values())
    return figure


def grid_legend(
    figure: Figure, columns: Sequence[Sequence[Block]], styles: dict[str, Look], extras: Iterable[Line2D]
) -> None:
    """Draw the legend of the grid's series; the figure grows by its rows.

    Args:
        figure: the figure.
        columns: the grid's places, by column.
        styles: looks by series.
        extras: further entries.
    """
    present = {name for places in columns for block in places for name in block.study.series}
    handles = [
        entry(name, look.color, linestyle=look.dashes, marker=look.marker, markersize=4.5)
        for name, look in styles.items()
        if name in present
    ]
    handles += extras
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (math.ceil(len(handles) / LEGEND_COLUMNS) - 1))
    fitting_legend(figure, handles, LEGEND_COLUMNS, handlelength=2.2, columnspacing=1.4)


def _draw_place(
    pair: tuple[Axes, Axes], block: Block, column: str, styles: dict[str, Look], width: float
) -> dict[str, Line2D]:
    """Draw one place, all rates above and the zoom beneath; return its further legend entries. ``width`` in inches."""
    tables, (wide, zoomed) = _tables(block.study, column), pair
    wide.set_title(block.title, loc="left", fontweight="bold")
    unigram = frequency_nll(block.study.runs) if column == VALIDATION else math.nan
    extras = _panel(wide, tables, unigram, styles, width, log=True)
    near = zoom(block.study, column)
    if not near:
        zoomed.axis("off")
        return extras
    part = {name: table[table.index.isin(near)] for name, table in tables.items()}
    zoomed.set_title("linear", loc="left", fontsize=7.5, color=MUTED, pad=2)
    return extras | _panel(zoomed, part, unigram, styles, width, log=False)


def zoom(study: Study, column: str = VALIDATION) -> list[float]:
    """Return the rates of a study's zoom, three at least; [] for a study with fewer.

    It starts at the highest rate within every mechanism's window, or at the highest best rate if all windows are open.
    """
    lrs = sorted({float(lr) for lr in study.runs["lr"]})
    found = [each.median for each in windows(study, column=column).values() if each.median is not None]
    left = [each.high.lr for each in found if not each.open_high]
    start = min(left, default=max((each.best_lr for each in found), default=0.0))
    first = max((place for place, lr in enumerate(lrs) if lr <= start * (1 + 1e-9)), default=0)
    return lrs[min(first, len(lrs) - FEWEST_ZOOMED) :] if len(lrs) >= FEWEST_ZOOMED else []


def _panel(
    ax: Axes, tables: Tables, unigram: float, styles: dict[str, Look], width: float, *, log: bool
) -> dict[str, Line2D]:
    """Draw one panel's lines, seeds and marks, or the reason for an empty one."""
    lrs = sorted({lr for table in tables.values() for lr in table.index})
    if log:
        lr_axis(ax, lrs, most=MOST_TICKS + 1)
    else:
        _linear_axis(ax, lrs)
    if not is_any_finite(tables.values()):
        values = np.concatenate([table.to_numpy(dtype=float).ravel() for table in tables.values()])
        said = "every run diverged" if np.isinf(values).any() else "no result yet"
        ax.text(0.5, 0.5, said, transform=ax.transAxes, ha="center", color=MUTED)
        ax.set_yticks([])
    else:
        nll_limits(ax, tables, unigram)
        for name, table in tables.items():
            nll_line(ax, table, styles[name])
    ax.tick_params(labelsize=7)
    top_marks(ax, tables, styles, width)
    return {str(line.get_label()): line for line in nll_extras(tables, ax)}


def _linear_axis(ax: Axes, lrs: Sequence[float]) -> None:
    """Make the x axis linear, with at most four of the rates as ticks: the highest, and others without overlap."""
    room = 0.07 * (lrs[-1] - lrs[0] or lrs[0])
    ax.set_xlim(lrs[0] - room, lrs[-1] + room)
    shown = [lrs[-1]]
    for lr in reversed(lrs):
        if shown[-1] - lr > (lrs[-1] - lrs[0]) / MOST_TICKS:
            shown.append(lr)
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(shown, [lr_text(lr) for lr in shown])


ALPHA_HEIGHT = 1.75
FOOT = 0.04, 0.34  # band of a panel's height with the crosses of diverged mechanisms, in shares
ALPHA_CAPTION = (
    "α_max against learning rate, {phase}, {state}, a column for each modality, a row for each size, after the "
    "consensus paper's Figure 6: median of the finite α_max of all recorded steps; shade: from the lowest to the "
    "highest of the single runs' medians; red dashes: the training LR α; where the median lies below it, at least half "
    "of the steps with a finite α_max are too long. ×: mechanisms of which runs diverged there and have no such "
    "checkpoint. Step by step: in the studies' own reports."
)


def alpha_grids(blocks: Sequence[Block], phase: str, state: str) -> list[Figure]:
    """Draw the grid of one phase and state; none if not measured.

    Several figures beyond three modalities or sizes.

    Args:
        blocks: the grid's places.
        phase: phase of the checkpoints.
        state: optimizer state of the measurement.
    """
    shown = [block for block in blocks if (phase, state) in phases_and_states(block.study)]
    shown = [block for block in shown if (_medians(block, phase, state) > 0).any()]
    if not shown:
        return []
    styles = looks(join_runs(shown))
    return [_alpha_figure(columns, phase, state, styles) for columns in _pages(shown)]


def _medians(block: Block, phase: str, state: str) -> Frame:
    """Return the median of the finite α_max by series and learning rate."""
    rows = recorded_steps(block.study, phase, state)
    found = {key: finite_median(part["alpha_max"]) for key, part in rows.groupby(["series", "run_lr"])}
    return pd.Series(found, dtype=float)


def _alpha_figure(columns: Sequence[Sequence[Block]], phase: str, state: str, styles: dict[str, Look]) -> Figure:
    """Draw one figure; ``columns`` are modalities with their places from top to bottom."""
    depth = max(map(len, columns))
    share = 1.0 if len(columns) > 1 else 0.62
    figure = Figure(figsize=(WIDTH_INCHES * share, 0.5 + ALPHA_HEIGHT * depth), layout="constrained")
    grid: Any = figure.subplots(depth, len(columns), squeeze=False)
    for line, place in np.ndindex(depth, len(columns)):
        if line < len(columns[place]):
            _alpha_panel(grid[line, place], columns[place][line], phase, state, styles)
        else:
            grid[line, place].remove()
    for ax in grid[:, 0]:
        ax.set_ylabel("$\\alpha_\\mathrm{max}$")
    for ax in grid[-1]:
        ax.set_xlabel("learning rate α")
    extras = [entry("training LR α", **TRAINING)]
    counts = (count_stable_steps(block.study, phase, state) for places in columns for block in places)
    if any((count["outcome"] == DIVERGED).any() for count in counts):
        extras.append(mark_entry("runs diverged", "x"))
    grid_legend(figure, columns, styles, extras)
    return figure


def _alpha_panel(ax: Axes, block: Block, phase: str, state: str, styles: dict[str, Look]) -> None:
    """Draw one place: a line for each measured mechanism, and crosses at the foot for its diverged runs."""
    count, medians = count_stable_steps(block.study, phase, state), _medians(block, phase, state)
    lrs = sorted(set(block.study.runs["lr"]))
    lr_axis(ax, lrs, most=4)
    ax.set_yscale("log")
    ax.set_title(block.title, loc="left", fontweight="bold")
    ax.tick_params(labelsize=7)
    ends = np.array(ax.get_xlim())
    ax.plot(ends, ends, zorder=2, **TRAINING)
    lost = [name for name in block.study.series if (count.loc[count["series"] == name, "outcome"] == DIVERGED).any()]
    for name in block.study.series:
        own = count[count["series"] == name]
        if name in medians.index.get_level_values(0):
            line = medians[name].where(medians[name] > 0)
            ax.plot(line.index, line, color=styles[name].color, marker=styles[name].marker, markersize=3.2,
                    linestyle=styles[name].dashes, linewidth=1.1, zorder=4)  # fmt: skip
            runs = own[own["median"] > 0].groupby("run_lr")["median"].agg(["min", "max"])
            ax.fill_between(runs.index, runs["min"], runs["max"], color=styles[name].color, alpha=0.15, linewidth=0)
        if name in lost:
            strip = blended_transform_factory(ax.transData, ax.transAxes)
            there = sorted(set(own.loc[own["outcome"] == DIVERGED, "run_lr"]))
            # stacked within the foot, since several may diverge at one rate
            height = FOOT[0] + min(0.055, (FOOT[1] - FOOT[0]) / len(lost)) * lost.index(name)
            ax.plot(there, [height] * len(there), "x", color=styles[name].color, markersize=3.6, transform=strip)
