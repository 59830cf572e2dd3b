"""Draw the legend of a figure whose lines are mechanisms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.style import Look

LEGEND_CHARACTERS = 112


def mechanism_legend(
    figure: Figure, styles: dict[str, Look], extras: Sequence[Line2D] = (), *, markers: bool = True
) -> None:
    """Draw a legend above the figure: a line per series (with its marker where the figure has them), then
    ``extras``."""
    handles = [
        Line2D(
            [], [], color=s.color, linestyle=s.dashes, marker=s.marker if markers else "", markersize=4.5, label=name
        )
        for name, s in styles.items()
    ]
    handles += extras
    figure.legend(
        handles=handles, loc="outside upper center", ncols=legend_columns(handles), handlelength=2.2, columnspacing=1.6
    )


def legend_columns(handles: Sequence[Line2D]) -> int:
    """Return the number of a legend's columns: one row where it fits the figure's width, else rows of one length; an
    entry takes its label and about eight characters more."""
    lengths = [len(str(handle.get_label())) + 8 for handle in handles]
    if sum(lengths) <= LEGEND_CHARACTERS:
        return len(handles)
    rows = math.ceil(len(handles) / max(1, LEGEND_CHARACTERS // max(lengths)))
    return math.ceil(len(handles) / rows)
