"""Draw the legend of a figure whose lines are mechanisms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.style import LEGEND_ROW, Look

LEGEND_CHARACTERS = 112
ROWS_FORESEEN = 2  # for which the figures' own heights have room


def mechanism_legend(
    figure: Figure, styles: dict[str, Look], extras: Sequence[Line2D] = (), *, markers: bool = True
) -> None:
    """Draw a legend above the figure: a line per series (with its marker where the figure has them), then ``extras``.
    The figure grows by the rows beyond the second, or the legend of many series would take the panels' room."""
    handles = [
        Line2D(
            [], [], color=s.color, linestyle=s.dashes, marker=s.marker if markers else "", markersize=4.5, label=name
        )
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
