"""Draw the marks that several figures have, and the legends that explain them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.style import INK, LEGEND_ROW, MUTED, Look, fitting_legend
from analysis.numbers.step_shares import DIVERGED
from analysis.study.load import Frame
from analysis.words import lr_text

LEGEND_CHARACTERS = 112
ROWS_FORESEEN = 2  # for which the figures' own heights have room
PANELS_PER_ROW = 4
LR_COLOR = "#C1121F"  # the training learning rate, red and dashed as in the paper's Figure 6
TRAINING: dict[str, Any] = {"color": LR_COLOR, "linewidth": 0.9, "linestyle": (0, (4, 2))}


def mark(ax: Axes, x: Any, y: Any, marker: str, color: Any, size: float, **look: Any) -> None:
    """Draw marks without a line between them.

    Args:
        ax: the panel.
        x, y: their places.
        marker, color, size: in points.
        look: what else the marks have.
    """
    ax.plot(x, y, marker, color=color, markersize=size, **look)


def dots(ax: Axes, x: Any, y: Any, marker: str, color: Any, size: float = 4.2, **look: Any) -> None:
    """Draw marks with a white edge, as single runs have; arguments as of `mark`."""
    mark(ax, x, y, marker, color, size, **{"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 4} | look)


def say_instead(ax: Axes, text: str, va: str = "center") -> None:
    """Write in a panel why it has nothing to show."""
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va=va, color=MUTED, fontsize=8)


def say_diverged(ax: Axes, count: Frame, by: str) -> None:
    """Write above a panel how many runs have no line because they diverged (in every state alike), ``by`` series or
    run_lr: sa 2/3, sw 3/3."""
    told = []
    for key, runs in count.groupby(by, sort=False):
        diverged, name = int((runs["outcome"] == DIVERGED).sum()), key if isinstance(key, str) else lr_text(float(key))
        told += [f"{name} {diverged}/{len(runs)}"] if diverged else []
    if told:
        ax.set_title(textwrap.fill(f"diverged: {', '.join(told)}", 22), loc="right", fontsize=6, color=INK)


def entry(label: str, color: Any = MUTED, **look: Any) -> Line2D:
    """Return a legend's entry."""
    return Line2D([], [], label=label, color=color, **look)


def mark_entry(label: str, marker: str, size: float = 4, color: Any = MUTED, **look: Any) -> Line2D:
    """Return a legend's entry of marks without a line."""
    return Line2D([], [], label=label, marker=marker, markersize=size, linestyle="none", color=color, **look)


def rate_entries(colors: Mapping[float, Any]) -> list[Line2D]:
    """Return a legend's entries of learning rates by their colours."""
    return [entry(lr_text(lr), color, linewidth=1.8) for lr, color in colors.items()]


def rate_legend(figure: Figure, colors: Mapping[float, Any], more: Sequence[Line2D] = ()) -> None:
    """Draw the legend of a figure whose lines are learning rates, then ``more``."""
    handles = [*rate_entries(colors), *more]
    fitting_legend(figure, handles, 8, title="learning rate", title_fontsize=8.5, handlelength=1.4, columnspacing=1.3)


def mechanism_legend(
    figure: Figure, styles: dict[str, Look], extras: Sequence[Line2D] = (), *, markers: bool = True
) -> None:
    """Draw a legend above the figure: a line per series (with its marker where the figure has them), then ``extras``.
    The figure grows by the rows beyond the second, or the legend of many series would take the panels' room."""
    handles = [
        entry(name, s.color, linestyle=s.dashes, marker=s.marker if markers else "", markersize=4.5)
        for name, s in styles.items()
    ]
    handles += extras
    columns = legend_columns(handles)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.2, columnspacing=1.6)
    further = max(0, math.ceil(len(handles) / columns) - ROWS_FORESEEN)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * further)


def legend_columns(handles: Sequence[Line2D]) -> int:
    """Return the number of a legend's columns: one row where it fits the figure's width, else rows of one length; an
    entry takes its label and about eight characters more."""
    lengths = [len(str(handle.get_label())) + 8 for handle in handles]
    if sum(lengths) <= LEGEND_CHARACTERS:
        return len(handles)
    rows = math.ceil(len(handles) / max(1, LEGEND_CHARACTERS // max(lengths)))
    return math.ceil(len(handles) / rows)
