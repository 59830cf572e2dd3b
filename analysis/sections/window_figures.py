"""Figures of the stable windows."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.style import INK, WIDTH_INCHES, Look, looks
from analysis.drawing.tables import width_text
from analysis.numbers.windows import SeriesWindows, windows
from analysis.study.load import Study

WINDOW_CAPTION = (
    "Widths of the stable windows. Bar and number: of the median line; points: single seeds; arrow: open, a lower "
    "bound; hatched: where the edge may still lie, the neighbouring rate having diverged."
)


def window_figure(study: Study) -> Figure | None:
    """Draw the widths of the stable windows in decades, the seeds' own as points; None where no series has one, or for
    a single LR."""
    found = {name: each for name, each in windows(study).items() if each.median is not None}
    if not found or study.runs["lr"].nunique() < 2:
        return None
    styles = looks(study)
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + 0.3 * len(found)), layout="constrained")
    ax = figure.subplots()
    both = [bound for each in found.values() if each.median for bound in (each.median.width, each.median.width_max)]
    bounds = [bound for bound in both if math.isfinite(bound)]
    span = max(1.08 * max([*bounds, *(width for each in found.values() for width in each.seed_widths)]), 0.3)
    for row, (name, each) in enumerate(found.items()):
        _width_bar(ax, row, each, styles[name])
    ax.set_yticks(range(len(found)), list(found))
    ax.set_ylim(len(found) - 0.45, -0.55)
    ax.set_xlim(0, span)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_xlabel("width of the stable window (decades of learning rate)")
    return figure


def _width_bar(ax: Axes, row: int, each: SeriesWindows, style: Look) -> None:
    """Draw one series' width as a bar, hatched up to what it may be at most, with the seeds' own as points and an arrow
    where it is open."""
    found = each.median
    assert found is not None, "series without a window are left out"
    ax.barh(row, found.width, height=0.56, color=style.color, alpha=0.8, zorder=2)
    if math.isfinite(found.width_max) and found.width_max > found.width:
        unsure = {"facecolor": "none", "edgecolor": style.color, "hatch": "////", "linewidth": 0.6}
        ax.barh(row, found.width_max - found.width, left=found.width, height=0.56, zorder=2, **unsure)
    seeds = sorted(each.seed_widths) if len(each.by_seed) > 1 else []
    spots = np.linspace(-0.14, 0.14, len(seeds)) if len(seeds) > 1 else [0.0] * len(seeds)
    dots = {"markersize": 3, "markeredgecolor": "white", "markeredgewidth": 0.4, "clip_on": False}
    ax.plot(seeds, [row + spot for spot in spots], "o", color=INK, zorder=4, **dots)
    if math.isinf(found.width_max):
        arrow = {"arrowstyle": "<-", "color": style.color, "linewidth": 1.6}
        ax.annotate("", (found.width, row), xytext=(16, 0), textcoords="offset points", arrowprops=arrow, zorder=3)
    beside = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    ax.annotate(width_text(found), (1.01, row), va="center", fontsize=8.5, color=INK, **beside)
