"""Convert a matplotlib figure to plotly's format, artist by artist: the same lines, areas, bars and words.

The result can be zoomed and read in a browser. Each figure of the reports is drawn once, by matplotlib; no second
drawing code can differ from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from analysis.drawing.files import lay_out
from analysis.drawing.traces import Spec, Unknown, look, to_html, traces

DPI = 96.0  # CSS pixels to the inch
TOOLS = 44  # pixels beside the figure for the buttons to zoom with
SIGNS = {
    "o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖", "<": "◀", ">": "▶", "p": "⬟", "h": "⬢",
    "d": "♦", "x": "×", "+": "+", "*": "★", ".": "•", "|": "|", "_": "–",
}  # fmt: skip


def describe(figure: Figure) -> Spec:
    """Return ``data`` and ``layout`` of a plotly figure, its size in inches times `DPI`.

    Raises:
        Unknown: three-dimensional axes, or an artist new to the reports' figures.
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
        data += [{**trace, "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in traces(axes, names)]
        layout["annotations"] += list(_words(axes, suffix))
    layout["annotations"] += list(_titles(figure)) + list(_legends(figure))
    return {"data": data, "layout": layout}


def _measure(figure: Figure) -> None:
    """Compute screen sizes of words and places of legends, without drawing."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    with renderer._draw_disabled():  # type: ignore[attr-defined]
        for legend in _find_legends(figure):
            legend.draw(renderer)


def _extent(text: Text) -> Bbox:
    """Return a word's place on a screen, in shares of the figure."""
    figure = text.get_figure(root=True)
    assert figure is not None, "a word of no figure"
    return text.get_window_extent(figure.canvas.get_renderer()).transformed(figure.transFigure.inverted())  # type: ignore[attr-defined]


def _find_legends(figure: Figure) -> list[Legend]:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [legend for legend in legends if legend is not None]


def _names(figure: Figure) -> dict[tuple[Any, ...], str]:
    """Return each artist's legend label by style, shown on hovering over a line."""
    return {
        look(handle): text.get_text()
        for legend in _find_legends(figure)
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=False)
        if isinstance(handle, Line2D)
    }


def _place(axes: Axes, suffix: str, layout: Spec) -> None:
    """Add a panel's two axes to the layout at their place in the figure."""
    box = axes.get_position()
    shown = axes.axison
    for side, axis, other, span in (("x", axes.xaxis, "y", (box.x0, box.x1)), ("y", axes.yaxis, "x", (box.y0, box.y1))):
        low, high = axes.get_xlim() if side == "x" else axes.get_ylim()
        scale = "log" if axis.get_scale() == "log" else "linear"
        ends = [math.log10(low), math.log10(high)] if scale == "log" else [low, high]
        ticks = [
            (at, label.get_text())
            for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
            if min(low, high) <= at <= max(low, high) and label.get_text()
        ]
        layout[f"{side}axis{suffix}"] = {
            "domain": [round(max(0.0, span[0]), 5), round(min(1.0, span[1]), 5)],
            "anchor": f"{other}{suffix}",
            "type": scale,
            "range": [float(end) for end in ends],
            "title": {"text": to_html(axis.get_label_text()), "standoff": 4},
            "tickmode": "array",
            "tickvals": [float(at) for at, _ in ticks],
            "ticktext": [to_html(text) for _, text in ticks],
            "tickfont": {"size": 10},
            "visible": bool(shown),
            "showline": True,
            "linecolor": "#5b6470",
            "gridcolor": "#e3e6ea",
            "zeroline": False,
        }


def _words(axes: Axes, suffix: str) -> Iterator[Spec]:
    """Yield a panel's title and annotations."""
    box = axes.get_position()
    for text in (axes.title, axes._left_title, axes._right_title):  # type: ignore[attr-defined]
        if text.get_text():
            left = text is axes._left_title  # type: ignore[attr-defined]
            x = box.x0 if left else (box.x0 + box.x1) / 2
            yield _note(text, (x, box.y1), "left" if left else "center", "bottom")
    for text in axes.texts:
        if not text.get_text() or not text.get_visible():
            continue
        here = text.get_transform() if not isinstance(text, Annotation) else None
        if here == axes.transData or (isinstance(text, Annotation) and text.xycoords == "data"):
            x, y = text.xy if isinstance(text, Annotation) else text.get_position()
            logs = [axis.get_scale() == "log" for axis in (axes.xaxis, axes.yaxis)]
            at = [math.log10(end) if log else float(end) for end, log in zip((x, y), logs, strict=True)]
            note = _note(text, (at[0], at[1]), text.get_horizontalalignment(), text.get_verticalalignment())
            yield note | {"xref": f"x{suffix}", "yref": f"y{suffix}"}
        else:
            extent = _extent(text)
            yield _note(text, (extent.x0, extent.y0), "left", "bottom")


def _titles(figure: Figure) -> Iterator[Spec]:
    """Yield the whole figure's title and labels."""
    for text in (figure._suptitle, figure._supxlabel, figure._supylabel, *figure.texts):  # type: ignore[attr-defined]
        if text is not None and text.get_text():
            extent = _extent(text)
            yield _note(text, ((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2), "center", "middle")


def _legends(figure: Figure) -> Iterator[Spec]:
    """Yield every legend's entries at their places, each with a sign in its colour."""
    for legend in _find_legends(figure):
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=False):
            extent = _extent(text)
            shade = (
                handle.get_color() if isinstance(handle, Line2D) else getattr(handle, "get_facecolor", lambda: "k")()
            )
            shade = np.asarray(shade)[0] if np.ndim(shade) > 1 else shade
            marker = str(handle.get_marker()) if isinstance(handle, Line2D) else ""
            sign = f'<span style="color:{colors.to_hex(shade)}">{SIGNS.get(marker, "▬")}</span> '
            note = _note(text, (extent.x0, (extent.y0 + extent.y1) / 2), "left", "middle")
            yield note | {"text": sign + to_html(text.get_text())}


def _note(text: Text, at: tuple[float, float], across: str, along: str) -> Spec:
    """Return a text placed by shares of the figure or by a panel's data."""
    return {
        "text": to_html(text.get_text()),
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
