"""Draw marks shared by several figures, and their legends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, Look, fitting_legend
from analysis.numbers.step_shares import DIVERGED
from analysis.study.load import Frame, Study
from analysis.words import lr_text

LEGEND_CHARACTERS = 112
ROWS_FORESEEN = 2  # included in the figures' heights
PANELS_PER_ROW = 4
MOST_RATES = 10  # entries of a legend
LR_COLOR = "#C1121F"  # the training learning rate, red and dashed as in the paper's Figure 6
TRAINING: dict[str, Any] = {"color": LR_COLOR, "linewidth": 0.9, "linestyle": (0, (4, 2))}


def mark(ax: Axes, x: Any, y: Any, marker: str, color: Any, size: float, **look: Any) -> None:
    """Draw marks without a line between them.

    Args:
        ax: the panel.
        x: their x coordinates.
        y: their y coordinates.
        marker: matplotlib's marker.
        color: their colour.
        size: in points.
        look: further properties of the marks.
    """
    ax.plot(x, y, marker, color=color, markersize=size, **look)


def dots(ax: Axes, x: Any, y: Any, marker: str, color: Any, size: float = 4.2, **look: Any) -> None:
    """Draw marks with a white edge, the style of single runs.

    Args:
        ax: the panel.
        x: their x coordinates.
        y: their y coordinates.
        marker: matplotlib's marker.
        color: their colour.
        size: in points.
        look: further properties of the marks.
    """
    mark(ax, x, y, marker, color, size, **{"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 4} | look)


def draw_seeds(ax: Axes, rows: Frame, x: str, y: str, look: Look) -> None:
    """Draw one series: the median at each x as a line, the seeds as points.

    Args:
        ax: the panel.
        rows: one per seed and x.
        x: column of the x coordinates.
        y: column of the y coordinates.
        look: the series' look.
    """
    median = rows.groupby(x)[y].median()
    ax.plot(median.index, median, color=look.color, linestyle=look.dashes, zorder=3)
    dots(ax, rows[x], rows[y], look.marker, look.color)


def say_instead(ax: Axes, text: str, va: str = "center") -> None:
    """Write the reason for an empty panel into it.

    Args:
        ax: the panel.
        text: the reason.
        va: vertical alignment.
    """
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va=va, color=MUTED, fontsize=8)


def say_diverged(ax: Axes, count: Frame, by: str) -> None:
    """Write the share of runs without a line, because they diverged, above a panel: sa 2/3, sw 3/3.

    Args:
        ax: the panel.
        count: runs of `count_stable_steps`; every state has the same diverged ones.
        by: series or run_lr.
    """
    told = []
    for key, runs in count.groupby(by, sort=False):
        diverged, name = int((runs["outcome"] == DIVERGED).sum()), key if isinstance(key, str) else lr_text(float(key))
        told += [f"{name} {diverged}/{len(runs)}"] if diverged else []
    if told:
        ax.set_title(textwrap.fill(f"diverged: {', '.join(told)}", 22), loc="right", fontsize=6, color=INK)


def symbols(text: str) -> str:
    """Return a figure's text with α_max set as in a formula."""
    return text.replace("α_max", "$\\alpha_\\mathrm{max}$")


def entry(label: str, color: Any = MUTED, **look: Any) -> Line2D:
    """Return a legend's entry.

    Args:
        label: its text.
        color: colour of its line.
        look: further properties of the line.
    """
    return Line2D([], [], label=label, color=color, **look)


def mark_entry(label: str, marker: str, size: float = 4, color: Any = MUTED, **look: Any) -> Line2D:
    """Return a legend's entry for marks without a line.

    Args:
        label: its text.
        marker: matplotlib's marker.
        size: in points.
        color: the mark's colour.
        look: further properties of the mark.
    """
    return Line2D([], [], label=label, marker=marker, markersize=size, linestyle="none", color=color, **look)


def rate_entries(figure: Figure, colors: Mapping[float, Any]) -> list[Line2D]:
    """Return a legend's entries for learning rates by colour: at most `MOST_RATES`, evenly spaced in order.

    Each line of the figure in one of the colours is labelled with its rate, so that a browser names those without an
    entry.

    Args:
        figure: the drawn figure.
        colors: colours by learning rate, in order.
    """
    labels = {to_hex(color): lr_text(lr) for lr, color in colors.items()}
    for line in (line for ax in figure.axes for line in ax.lines):
        if str(line.get_label()).startswith("_") and (label := labels.get(to_hex(line.get_color()))):
            line.set_label(label)
    lrs = list(colors)
    places = sorted({round(place) for place in np.linspace(0, len(lrs) - 1, min(MOST_RATES, len(lrs)))})
    return [entry(lr_text(lrs[place]), colors[lrs[place]], linewidth=1.8) for place in places]


def rate_title(colors: Mapping[float, Any]) -> str:
    """Return the title of a legend of learning rates; of a thinned one with the number of all."""
    return "learning rate" if len(colors) <= MOST_RATES else f"learning rate, {MOST_RATES} of {len(colors)} in order"


def choose_panels(study: Study, first: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the series of a row of `PANELS_PER_ROW` panels: the first ones wanted, then others in the study's order.

    Args:
        study: the study.
        first: the series wanted.
        known: the series that can be drawn.
    """
    return [name for name in dict.fromkeys([*first, *study.series]) if name in known][:PANELS_PER_ROW]


def rate_legend(figure: Figure, colors: Mapping[float, Any], more: Sequence[Line2D] = ()) -> None:
    """Draw a legend of learning rates; of many only `MOST_RATES`, since neighbouring colours are alike.

    Args:
        figure: the figure.
        colors: colours by learning rate.
        more: further entries.
    """
    handles = [*rate_entries(figure, colors), *more]
    fitting_legend(
        figure, handles, 8, title=rate_title(colors), title_fontsize=8.5, handlelength=1.4, columnspacing=1.3
    )


def mechanism_legend(
    figure: Figure, styles: dict[str, Look], extras: Sequence[Line2D] = (), *, markers: bool = True
) -> None:
    """Draw a legend above the figure: a line per series, then ``extras``.

    Args:
        figure: the figure.
        styles: looks by series.
        extras: further entries.
        markers: whether lines have the series' markers.
    """
    handles = [
        entry(name, s.color, linestyle=s.dashes, marker=s.marker if markers else "", markersize=4.5)
        for name, s in styles.items()
    ]
    handles += extras
    columns = legend_columns(handles, figure.get_figwidth() / WIDTH_INCHES)
    length = 2.2 if len({s.dashes for s in styles.values()}) == 1 else 3.6  # a marker hides a short line's gaps
    fitting_legend(figure, handles, columns, foreseen=ROWS_FORESEEN, handlelength=length, columnspacing=1.6)


def legend_columns(handles: Sequence[Line2D], width: float = 1.0) -> int:
    """Return a legend's number of columns: one row if it fits the figure's width, else rows of one length.

    An entry is as wide as its label and about eight more characters. ``width``: of the figure, as a share of a page's.
    """
    lengths, room = [len(str(handle.get_label())) + 8 for handle in handles], int(LEGEND_CHARACTERS * width)
    if sum(lengths) <= room:
        return len(handles)
    rows = math.ceil(len(handles) / max(1, room // max(lengths)))
    return math.ceil(len(handles) / rows)
