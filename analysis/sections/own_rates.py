"""Name the unit of rates in a study whose optimizers have rates of their own: in axes, legends and column headings.

Sections write "LR" and "learning rate"; here each rate is a multiple of its optimizer's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from analysis.drawing.pieces import Picture, Pieces
from analysis.drawing.typeset import Table
from analysis.study.load import Study

HEADINGS = {"LR": "× own LR", "best LR": "best × own LR"}
RATE, OWN = "learning rate", "times own rate"
LABELS = {RATE: OWN, f"{RATE} α": f"α, {OWN}"}


def name_rates(study: Study, pieces: Pieces) -> Pieces:
    """Return a report's pieces with the unit of their rates; unchanged but for rates of each optimizer's own."""
    if not study.is_in_multiples:
        return pieces
    for piece in pieces:
        if isinstance(piece, Picture):
            _name_axes(piece.figure)
    return tuple(name_in_table(study, piece) for piece in pieces)


def name_in_table(study: Study, piece: Any) -> Any:
    """Return a table with the unit of rates in its header; all else, and other studies' tables, as they are."""
    if not study.is_in_multiples or not isinstance(piece, Table):
        return piece
    return replace(piece, header=tuple(HEADINGS.get(text, text) for text in piece.header))


def _name_axes(figure: Figure) -> None:
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if (text := LABELS.get(axis.get_label_text())) is not None:
                axis.set_label_text(text)
    for title in _legend_titles(figure):
        if title.get_text().startswith(RATE):
            title.set_text(OWN + title.get_text().removeprefix(RATE))


def _legend_titles(figure: Figure) -> Iterable:
    own = (ax.get_legend() for ax in figure.axes)
    return [legend.get_title() for legend in (*figure.legends, *own) if legend is not None]
