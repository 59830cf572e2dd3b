"""Draw the grid of the consensus paper's Figure 6: α_max of each mechanism against the learning rate, a column for each
modality and a row for each size, the training's own rate in red dashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from analysis.drawing.style import MUTED, WIDTH_INCHES, Look, looks, lr_axis
from analysis.drawing.tables import chunks
from analysis.numbers.step_shares import DIVERGED, counted, finite_median, phases_and_states, recorded
from analysis.paper.figures import COLUMNS, ROWS, grid_legend
from analysis.paper.grid import Block, all_runs, by_modality
from analysis.sections.step_figures import TRAINING
from analysis.study.load import Frame

HEIGHT = 1.75
FOOT = 0.04, 0.34  # of a panel, in shares of its height: where crosses stand for mechanisms that diverged
CAPTION = (
    "α_max against learning rate, {phase}, state “{state}”, a column for each modality, a row for each size, after the "
    "consensus paper's Figure 6: median of the finite α_max of all recorded steps; shade: from the lowest to the "
    "highest of the single runs' medians; red dashes: the training LR α; where the median lies below it, at least half "
    "of the steps with a finite α_max are too long. ×: mechanisms of which runs diverged there and have no such "
    "checkpoint. Step by step: in the studies' own reports."
)


def alpha_grids(blocks: Sequence[Block], phase: str, state: str) -> list[Figure]:
    """Draw the grid of one kind of checkpoint and optimizer state, over several figures where it has more than three
    modalities or sizes; none where nothing was measured."""
    shown = [block for block in blocks if (phase, state) in phases_and_states(block.study)]
    shown = [block for block in shown if (_medians(block, phase, state) > 0).any()]
    if not shown:
        return []
    styles, columns, figures = looks(all_runs(shown)), by_modality(shown), []
    for names in chunks(list(columns), COLUMNS):
        for start in range(0, max(len(columns[name]) for name in names), ROWS):
            part = [columns[name][start : start + ROWS] for name in names]
            figures.append(_figure([each for each in part if each], phase, state, styles))
    return figures


def _medians(block: Block, phase: str, state: str) -> Frame:
    """Return the median of the finite α_max by series and learning rate."""
    rows = recorded(block.study, phase, state)
    found = {key: finite_median(part["alpha_max"]) for key, part in rows.groupby(["series", "run_lr"])}
    return pd.Series(found, dtype=float)


def _figure(columns: Sequence[Sequence[Block]], phase: str, state: str, styles: dict[str, Look]) -> Figure:
    """Draw one figure; ``columns``: by modality the places one below the other."""
    depth = max(map(len, columns))
    share = 1.0 if len(columns) > 1 else 0.62
    figure = Figure(figsize=(WIDTH_INCHES * share, 0.5 + HEIGHT * depth), layout="constrained")
    grid: Any = figure.subplots(depth, len(columns), squeeze=False)
    for line, place in np.ndindex(depth, len(columns)):
        if line < len(columns[place]):
            _panel(grid[line, place], columns[place][line], phase, state, styles)
        else:
            grid[line, place].remove()
    for ax in grid[:, 0]:
        ax.set_ylabel("$\\alpha_\\mathrm{max}$")
    for ax in grid[-1]:
        ax.set_xlabel("learning rate α")
    extras = [Line2D([], [], label="training LR α", **TRAINING)]
    counts = (counted(block.study, phase, state) for places in columns for block in places)
    if any((count["outcome"] == DIVERGED).any() for count in counts):
        extras.append(Line2D([], [], color=MUTED, marker="x", markersize=4, linestyle="none", label="runs diverged"))
    grid_legend(figure, columns, styles, extras)
    return figure


def _panel(ax: Axes, block: Block, phase: str, state: str, styles: dict[str, Look]) -> None:
    """Draw one place: a line for each mechanism with a result, and crosses at the foot where runs of it diverged."""
    count, medians = counted(block.study, phase, state), _medians(block, phase, state)
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
            # one above the other, since several diverge at one rate, all of them within the foot
            height = FOOT[0] + min(0.055, (FOOT[1] - FOOT[0]) / len(lost)) * lost.index(name)
            ax.plot(there, [height] * len(there), "x", color=styles[name].color, markersize=3.6, transform=strip)
