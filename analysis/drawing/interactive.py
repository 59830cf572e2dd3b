"""Carry a matplotlib figure over to plotly's description of one, artist by artist: the same lines, areas, bars and
words, to be zoomed and read off in a browser.

Every figure of the reports is drawn once, by matplotlib; there is no second drawing code that could show something
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from analysis.drawing.layout import lay_out

Spec = dict[str, Any]
DPI = 96.0  # CSS pixels to the inch
TOOLS = 44  # pixels beside the figure for the buttons to zoom with
MARKERS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "d": "diamond-tall",
    "x": "x-thin-open", "+": "cross-thin-open", "*": "star", ".": "circle", "|": "line-ns-open", "_": "line-ew-open",
}  # fmt: skip

# of the mathematics in labels; what is left of it are powers and indices
WORDS = {
    r"\mathdefault": "",
    r"\mathrm": "",
    r"\max": "max",
    r"\times": "×",
    r"\alpha": "α",
    r"\lambda": "λ",
    r"\cdot": "·",
}

FILLED = (
    "PolyCollection",
    "FillBetweenPolyCollection",
)  # and not their kin, such as arrows, whose shapes are in pixels


class Unknown(ValueError):
    """The error of an artist that plotly's description has no counterpart for here; the message names it."""


def described(figure: Figure) -> Spec:
    """Return ``data`` and ``layout`` of a plotly figure, in inches of the original times `DPI`.

    Errors: `Unknown` for three-dimensional axes and for artists that no figure of the reports had so far.
    """
    lay_out(figure)
    _measure(figure)
    width, height = figure.get_size_inches() * DPI
    layout: Spec = {
        "width": round(width * 1.35) + TOOLS,
        "height": round(height * 1.35),
        "margin": {"l": 0, "r": TOOLS, "t": 0, "b": 0},
        "modebar": {"orientation": "v"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "showlegend": False,
        "hovermode": "closest",
        "font": {"family": "Georgia, serif", "size": 12},
        "annotations": [],
        "shapes": [],
    }
    data: list[Spec] = []
    names = _names(figure)
    for number, axes in enumerate(figure.axes, 1):
        if axes.name != "rectilinear":
            raise Unknown(f"{axes.name} axes")
        suffix = "" if number == 1 else str(number)
        _place(axes, suffix, layout)
        data += [{**trace, "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in _traces(axes, names)]
        layout["annotations"] += list(_words(axes, suffix))
    layout["annotations"] += list(_titles(figure)) + list(_legends(figure))
    return {"data": data, "layout": layout}


def _measure(figure: Figure) -> None:
    """Give words the sizes, and those of legends the places, that they have on a screen. Nothing is drawn."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    with renderer._draw_disabled():  # type: ignore[attr-defined]
        for legend in _all_legends(figure):
            legend.draw(renderer)


def _extent(text: Text) -> Bbox:
    """Return where a word stands on a screen, in shares of the figure."""
    figure = text.get_figure(root=True)
    assert figure is not None, "a word of no figure"
    return text.get_window_extent(figure.canvas.get_renderer()).transformed(figure.transFigure.inverted())  # type: ignore[attr-defined]


def _all_legends(figure: Figure) -> list[Legend]:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [legend for legend in legends if legend is not None]


def _names(figure: Figure) -> dict[tuple[Any, ...], str]:
    """Return what the figure's legends call a look, so that pointing at a line names it."""
    return {
        _look(handle): text.get_text()
        for legend in _all_legends(figure)
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=False)
        if isinstance(handle, Line2D)
    }


def _look(line: Line2D) -> tuple[Any, ...]:
    return colors.to_hex(line.get_color()), str(line.get_marker()), str(line.get_linestyle())


def _place(axes: Axes, suffix: str, layout: Spec) -> None:
    """Add the two axes of a panel to the layout, where they stand in the figure."""
    box = axes.get_position()
    shown = axes.axison
    for side, axis, other, span in (("x", axes.xaxis, "y", (box.x0, box.x1)), ("y", axes.yaxis, "x", (box.y0, box.y1))):
        low, high = axis.get_view_interval() if side == "x" else axes.get_ylim()
        if side == "x":
            low, high = axes.get_xlim()
        scale = "log" if axis.get_scale() == "log" else "linear"
        ends = [math.log10(low), math.log10(high)] if scale == "log" else [low, high]
        ticks = [
            (at, label.get_text())
            for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
            if min(low, high) <= at <= max(low, high) and label.get_text()
        ]
        layout[f"{side}axis{suffix}"] = {
            "domain": [
                round(max(0.0, end), 5) if index == 0 else round(min(1.0, end), 5) for index, end in enumerate(span)
            ],
            "anchor": f"{other}{suffix}",
            "type": scale,
            "range": [float(end) for end in ends],
            "title": {"text": plain(axis.get_label_text()), "standoff": 4},
            "tickmode": "array",
            "tickvals": [float(at) for at, _ in ticks],
            "ticktext": [plain(text) for _, text in ticks],
            "tickfont": {"size": 10},
            "visible": bool(shown),
            "showline": True,
            "linecolor": "#5b6470",
            "gridcolor": "#e3e6ea",
            "zeroline": False,
        }


def _traces(axes: Axes, names: dict[tuple[Any, ...], str]) -> Iterator[Spec]:
    """Yield what is drawn in a panel; its words, ticks and legend are elsewhere. Errors: `Unknown`."""
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
            yield _bar(artist)
        elif type(artist).__module__.split(".")[1] not in ("axis", "spines", "legend", "image"):
            raise Unknown(type(artist).__name__)


def _numbers(values: Any) -> list[float | None]:
    """Return numbers as JSON has them: None for what is not finite, where plotly breaks a line."""
    return [
        float(value) if math.isfinite(value) else None
        for value in np.ma.filled(np.asarray(values, dtype=float), np.nan)
    ]


def _line(axes: Axes, line: Line2D, names: dict[tuple[Any, ...], str]) -> Iterator[Spec]:
    """Yield a line. One that spans an axis (axvline, axhline) has that coordinate as a share of the axis."""
    x, y = np.atleast_1d(line.get_xdata(orig=False)), np.atleast_1d(line.get_ydata(orig=False))
    transform = line.get_transform()
    if transform == axes.get_xaxis_transform():
        low, high = axes.get_ylim()
        y = np.where(np.asarray(y) <= 0, low, high)
    elif transform == axes.get_yaxis_transform():
        low, high = axes.get_xlim()
        x = np.where(np.asarray(x) <= 0, low, high)
    elif transform != axes.transData:
        return  # a mark beside the axes, which belongs to their frame
    has_line = line.get_linestyle() not in ("None", "", " ") and len(x) > 1
    marker = MARKERS.get(str(line.get_marker()))
    if not has_line and marker is None:
        return
    step = {"steps-post": "hv", "steps-pre": "vh", "steps-mid": "hvh"}.get(str(line.get_drawstyle()), "linear")
    label = str(line.get_label())
    name = names.get(_look(line), "" if label.startswith("_") else label)
    yield {
        "type": "scatter",
        "mode": "+".join(kind for kind, there in (("lines", has_line), ("markers", marker)) if there),
        "x": _numbers(x),
        "y": _numbers(y),
        "name": plain(name),
        "hoverinfo": "x+y+name" if name else "x+y",
        "opacity": 1.0 if line.get_alpha() is None else float(line.get_alpha() or 0.0),
        "line": {
            "color": colors.to_hex(line.get_color()),
            "width": float(line.get_linewidth()) * 1.35,
            "dash": _dash(line),
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


def _dash(line: Line2D) -> str:
    _, pattern = line._unscaled_dash_pattern  # type: ignore[attr-defined]
    return "solid" if not pattern else ",".join(f"{max(1.0, 1.6 * part):g}px" for part in pattern)


def _areas(areas: PolyCollection) -> Iterator[Spec]:
    """Yield filled areas, each with its colour and how much shows through."""
    for path, colour in zip(areas.get_paths(), _each(areas.get_facecolor(), len(areas.get_paths())), strict=True):
        x, y = np.asarray(path.vertices, dtype=float).T
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": _numbers(x),
            "y": _numbers(y),
            "fill": "toself",
            "fillcolor": _rgba(colour),
            "line": {"width": 0},
            "hoverinfo": "skip",
        }


def _each(values: Any, count: int) -> list[Any]:
    return [values[index % len(values)] if len(values) else (0, 0, 0, 0) for index in range(count)]


def _rgba(colour: Any) -> str:
    red, green, blue, alpha = colors.to_rgba(colour)
    return f"rgba({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f},{alpha:.3f})"


def _segments(lines: LineCollection) -> Iterator[Spec]:
    for segment, colour in zip(lines.get_segments(), _each(lines.get_colors(), len(lines.get_segments())), strict=True):
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
        "marker": {"color": [_rgba(each) for each in _each(points.get_facecolor(), len(x))], "size": 7},
    }


def _bar(bar: Rectangle) -> Spec:
    """Return a bar as the area that it covers."""
    x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers([x, x + width, x + width, x, x]),
        "y": _numbers([y, y, y + height, y + height, y]),
        "fill": "toself",
        "fillcolor": _rgba(bar.get_facecolor()),
        "line": {"width": 0},
        "hoverinfo": "x+y",
    }


def _mesh(mesh: QuadMesh) -> Spec:
    """Return a coloured grid; of colours on a logarithmic scale the logarithms."""
    corners = np.asarray(mesh.get_coordinates(), dtype=float)
    values = np.ma.filled(np.ma.asarray(mesh.get_array(), dtype=float), np.nan).reshape(
        corners.shape[0] - 1, corners.shape[1] - 1
    )
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


def _words(axes: Axes, suffix: str) -> Iterator[Spec]:
    """Yield a panel's title and what is written into it."""
    box = axes.get_position()
    for text in (axes.title, axes._left_title, axes._right_title):  # type: ignore[attr-defined]
        if text.get_text():
            left = text is axes._left_title  # type: ignore[attr-defined]
            yield _note(
                text, (box.x0 if left else (box.x0 + box.x1) / 2, box.y1), "left" if left else "center", "bottom"
            )
    for text in axes.texts:
        if not text.get_text() or not text.get_visible():
            continue
        here = text.get_transform() if not isinstance(text, Annotation) else None
        if here == axes.transData or (isinstance(text, Annotation) and text.xycoords == "data"):
            x, y = text.xy if isinstance(text, Annotation) else text.get_position()
            logs = [axis.get_scale() == "log" for axis in (axes.xaxis, axes.yaxis)]
            at = [math.log10(end) if log else float(end) for end, log in zip((x, y), logs, strict=True)]
            yield _note(text, (at[0], at[1]), text.get_horizontalalignment(), text.get_verticalalignment()) | {
                "xref": f"x{suffix}",
                "yref": f"y{suffix}",
            }
        else:
            extent = _extent(text)
            yield _note(text, (extent.x0, extent.y0), "left", "bottom")


def _titles(figure: Figure) -> Iterator[Spec]:
    """Yield the words that belong to the whole figure: its title and labels."""
    for text in (figure._suptitle, figure._supxlabel, figure._supylabel, *figure.texts):  # type: ignore[attr-defined]
        if text is not None and text.get_text():
            extent = _extent(text)
            yield _note(text, ((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2), "center", "middle")


def _legends(figure: Figure) -> Iterator[Spec]:
    """Yield the entries of every legend where they stand, each with a sign in its colour."""
    for legend in _all_legends(figure):
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=False):
            extent = _extent(text)
            shade = (
                handle.get_color() if isinstance(handle, Line2D) else getattr(handle, "get_facecolor", lambda: "k")()
            )
            shade = np.asarray(shade)[0] if np.ndim(shade) > 1 else shade
            sign = f'<span style="color:{colors.to_hex(shade)}">▬</span> '
            yield _note(text, (extent.x0, (extent.y0 + extent.y1) / 2), "left", "middle") | {
                "text": sign + plain(text.get_text())
            }


def _note(text: Text, at: tuple[float, float], across: str, along: str) -> Spec:
    """Return a text at a place of the figure (in shares of it) or of a panel's data."""
    return {
        "text": plain(text.get_text()),
        "x": float(at[0]),
        "y": float(at[1]),
        "xref": "paper",
        "yref": "paper",
        "xanchor": across if across in ("left", "center", "right") else "center",
        "yanchor": {"top": "top", "center": "middle", "middle": "middle"}.get(along, "bottom"),
        "showarrow": False,
        "textangle": -float(text.get_rotation()),
        "font": {"size": float(text.get_fontsize()) * 1.25, "color": str(colors.to_hex(text.get_color()))},
    }


def plain(text: str) -> str:
    """Return matplotlib's text as the simple HTML that plotly reads: α_max and powers of ten with their indices."""
    out = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    for mark, sign in WORDS.items():
        out = out.replace(mark, sign)
    if "$" in out:
        out = _powers(out.replace("$", ""))
    return out.replace("α_max", "α<sub>max</sub>")


def _powers(text: str) -> str:
    """Return 10^{−3} and x_{i} with HTML's own raised and lowered signs."""
    for mark, tag in (("^", "sup"), ("_", "sub")):
        while f"{mark}{{" in text:
            before, _, rest = text.partition(f"{mark}{{")
            inside, _, after = rest.partition("}")
            text = f"{before}<{tag}>{inside}</{tag}>{after}"
    return text.replace("{", "").replace("}", "").replace("\\", "")
