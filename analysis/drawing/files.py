"""Lay a figure out once, for whatever it is written as: the panels stand in the same places in a PDF, a picture and a
page for the browser. Write files whole: a reader never sees a half-written one."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from analysis.drawing.style import RC


def replaced(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path``, in one step for whoever reads it, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


POINTS_PER_INCH = 72  # in which a PDF measures text


def lay_out(figure: Figure) -> None:
    """Give panels, titles and legends their places by the size of their text in a PDF; nothing where that is done.

    `Figure.savefig` would do it anew for every format, and draw all of the figure once more than it needs to for it.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    FigureCanvasPdf(figure)
    dpi, figure.dpi = figure.dpi, POINTS_PER_INCH
    with matplotlib.rc_context(RC):
        engine.execute(figure)
    figure.dpi = dpi
    figure.set_layout_engine(None)
