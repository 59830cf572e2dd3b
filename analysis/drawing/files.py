"""Lay a figure out once for all formats, and write files atomically.

Panels have the same places in a PDF, a picture and a browser page. A reader never sees a half-written file.
"""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from analysis.drawing.style import RC


def replace_file(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` atomically and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


POINTS_PER_INCH = 72  # a PDF's unit of text size


def lay_out(figure: Figure) -> None:
    """Place panels, titles and legends by their text size in a PDF, only once.

    `Figure.savefig` would repeat the layout for every format, with one more draw of the whole figure each time.
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
