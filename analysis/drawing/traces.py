"""Convert a panel's matplotlib artists to plotly's traces: lines, areas, bars, points and coloured grids."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from stability.printable import visible

Spec = dict[str, Any]
MARKERS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "d": "diamond-tall",
    "x": "x-thin-open", "+": "cross-thin-open", "*": "star", ".": "circle", "|": "line-ns-open", "_": "line-ew-open",
}  # fmt: skip

# not their subclasses, e.g. arrows with shapes in pixels
FILLED = ("PolyCollection", "FillBetweenPolyCollection")


class Unknown(ValueError):
    """Raised for an artist without a plotly counterpart here; the message names it."""


def traces(axes: Axes, names: dict[tuple[Any, ...], str]) -> Iterator[Spec]:
    """Yield a panel's traces; its words, ticks and legend are converted elsewhere.

    Raises:
        Unknown: an artist without a counterpart.
    """
    for artist in axes.get_children():
        if not artist.get_visible() or isinstance(artist, Text) or artist is axes.patch:
            continue
        if isinstance(artist, Line2D):
            yield from _line(axes, artist, names)
        elif isinstance(artist, QuadMesh):
            yield _mesh(artist)
        elif isinstance(artist, PathCollection):
            yield _scatter(artist)
        elif isinstance(artist, LineCollection):
            yield from _segments(artist)
        elif isinstance(artist, PolyCollection) and type(artist).__name__ in FILLED:
            yield from _areas(artist)
        elif isinstance(artist, Rectangle):
            x, y, width, height = artist.get_x(), artist.get_y(), artist.get_width(), artist.get_height()
            across, along = [x, x + width, x + width, x, x], [y, y, y + height, y + height, y]
            yield _area(across, along, artist.get_facecolor(), "x+y")
        elif type(artist).__module__.split(".")[1] not in ("axis", "spines", "legend"):
            raise Unknown(type(artist).__name__)


def _numbers(values: Any) -> list[float | None]:
    """Return numbers for JSON: None for non-finite ones, at which plotly breaks a line."""
    filled = np.ma.filled(np.asarray(values, dtype=float), np.nan)
    return [float(value) if math.isfinite(value) else None for value in filled]


def _line(axes: Axes, line: Line2D, names: dict[tuple[Any, ...], str]) -> Iterator[Spec]:
    """Yield a line; one across an axis (axvline, axhline) has that coordinate as a share of the axis."""
    x, y = np.atleast_1d(line.get_xdata(orig=False)), np.atleast_1d(line.get_ydata(orig=False))
    transform = line.get_transform()
    if transform == axes.get_xaxis_transform():
        low, high = axes.get_ylim()
        y = np.where(np.asarray(y) <= 0, low, high)
    elif transform == axes.get_yaxis_transform():
        low, high = axes.get_xlim()
        x = np.where(np.asarray(x) <= 0, low, high)
    elif transform != axes.transData:
        return  # a mark outside the panel, part of the frame
    has_line = line.get_linestyle() not in ("None", "", " ") and len(x) > 1
    marker = MARKERS.get(str(line.get_marker()))
    if not has_line and marker is None:
        return
    step = {"steps-post": "hv", "steps-pre": "vh", "steps-mid": "hvh"}.get(str(line.get_drawstyle()), "linear")
    label = str(line.get_label())
    name = names.get(look(line), "" if label.startswith("_") else label)
    _, pattern = line._unscaled_dash_pattern  # type: ignore[attr-defined]
    yield {
        "type": "scatter",
        "mode": "+".join(kind for kind, there in (("lines", has_line), ("markers", marker)) if there),
        "x": _numbers(x),
        "y": _numbers(y),
        "name": to_html(name),
        "hoverinfo": "x+y+name" if name else "x+y",
        "opacity": 1.0 if line.get_alpha() is None else float(line.get_alpha() or 0.0),
        "line": {
            "color": colors.to_hex(line.get_color()),
            "width": float(line.get_linewidth()) * 1.35,
            "dash": ",".join(f"{max(1.0, 1.6 * part):g}px" for part in pattern or ()) or "solid",
            "shape": step,
        },
        "marker": {
            "symbol": marker or "circle",
            "size": float(line.get_markersize()) * 1.5,
            "color": _colour(line.get_markerfacecolor(), "white"),
            "line": {"color": _colour(line.get_markeredgecolor(), "white"), "width": float(line.get_markeredgewidth())},
        },
    }


def _colour(value: Any, otherwise: str) -> str:
    return otherwise if isinstance(value, str) and value == "none" else str(colors.to_hex(value, keep_alpha=True))


def _areas(areas: PolyCollection) -> Iterator[Spec]:
    """Yield filled areas with colour and opacity."""
    for path, colour in zip(areas.get_paths(), _cycle(areas.get_facecolor(), len(areas.get_paths())), strict=True):
        x, y = np.asarray(path.vertices, dtype=float).T
        yield _area(x, y, colour, "skip")


def _area(x: Any, y: Any, colour: Any, hover: str) -> Spec:
    place = {"type": "scatter", "mode": "lines", "x": _numbers(x), "y": _numbers(y)}
    return place | {"fill": "toself", "fillcolor": _rgba(colour), "line": {"width": 0}, "hoverinfo": hover}


def _cycle(values: Any, count: int) -> list[Any]:
    return [values[index % len(values)] if len(values) else (0, 0, 0, 0) for index in range(count)]


def _rgba(colour: Any) -> str:
    red, green, blue, alpha = colors.to_rgba(colour)
    return f"rgba({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f},{alpha:.3f})"


def _segments(lines: LineCollection) -> Iterator[Spec]:
    for segment, colour in zip(
        lines.get_segments(), _cycle(lines.get_colors(), len(lines.get_segments())), strict=True
    ):
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": _numbers(segment[:, 0]),
            "y": _numbers(segment[:, 1]),
            "line": {"color": _rgba(colour), "width": 1.4},
            "hoverinfo": "skip",
        }


def _scatter(points: PathCollection) -> Spec:
    x, y = np.asarray(points.get_offsets(), dtype=float).T
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _numbers(x),
        "y": _numbers(y),
        "marker": {"color": [_rgba(each) for each in _cycle(points.get_facecolor(), len(x))], "size": 7},
    }


def _mesh(mesh: QuadMesh) -> Spec:
    """Return a coloured grid; on a logarithmic colour scale, of the logarithms."""
    corners = np.asarray(mesh.get_coordinates(), dtype=float)
    lines, columns = corners.shape[0] - 1, corners.shape[1] - 1
    values = np.ma.filled(np.ma.asarray(mesh.get_array(), dtype=float), np.nan).reshape(lines, columns)
    low, high = mesh.get_clim()
    shades = [[share, str(colors.to_hex(mesh.get_cmap()(share)))] for share in np.linspace(0, 1, 11)]
    if isinstance(mesh.norm, colors.LogNorm):
        values, low, high = np.log10(values), math.log10(low or 1.0), math.log10(high or 1.0)
    return {
        "type": "heatmap",
        "x": _numbers(corners[0, :, 0]),
        "y": _numbers(corners[:, 0, 1]),
        "z": [_numbers(row) for row in values],
        "zmin": float(low or 0.0),
        "zmax": float(high or 1.0),
        "colorscale": shades,
        "showscale": False,
    }


def look(line: Line2D) -> tuple[Any, ...]:
    """Return a line's style in a legend: colour, marker and dashes."""
    return colors.to_hex(line.get_color()), str(line.get_marker()), str(line.get_linestyle())


# the labels' mathematics apart from powers and indices
WORDS = {
    r"\mathdefault": "",
    r"\mathrm": "",
    r"\max": "max",
    r"\times": "×",
    r"\alpha": "α",
    r"\lambda": "λ",
    r"\cdot": "·",
}


def to_html(text: str) -> str:
    """Return matplotlib's text as plotly's simple HTML: α_max and powers of ten with their indices."""
    out = visible(text, keep="\n").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    for mark, sign in WORDS.items():
        out = out.replace(mark, sign)
    if "$" in out:
        out = _powers(out.replace("$", ""))
    return re.sub("([αλ])_max", r"\1<sub>max</sub>", out)


def _powers(text: str) -> str:
    """Return 10^{−3} and x_{i} with HTML's superscripts and subscripts."""
    for mark, tag in (("^", "sup"), ("_", "sub")):
        while f"{mark}{{" in text:
            before, _, rest = text.partition(f"{mark}{{")
            inside, _, after = rest.partition("}")
            text = f"{before}<{tag}>{inside}</{tag}>{after}"
    return text.replace("{", "").replace("}", "").replace("\\", "")
