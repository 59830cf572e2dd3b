"""Draw NLL against learning rate by size, and the best rate against size with its law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from analysis.drawing.marks import dots, entry, mark, mark_entry, say_instead
from analysis.drawing.style import FIXED, OTHERS, WIDTH_INCHES, fitting_legend, lr_axis
from analysis.numbers.size_laws import AXES, Law, Size
from analysis.numbers.transfer import Group, fit_law_of
from analysis.numbers.windows import median_line
from analysis.words import lr_text

MOST_PANELS = 3
CAPTION = (
    "Left: validation NLL against learning rate, a colour for each size. Points: seeds; line: their median; vertical "
    "marks: the best rate. Right: the best rate against the size, with its standard error. Lines and shade: the law "
    "and its 80 % interval, to twice the largest size. Crosses: what the law of the smaller sizes says of the largest."
)


def draw(groups: Sequence[Group]) -> Figure | None:
    """Draw curves for each group, at most `MOST_PANELS`, beside their laws; None if several sizes vary at once."""
    shown = [group for group in groups if len(group.axes) == 1][:MOST_PANELS]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 2.9), layout="constrained")
    *panels, last = figure.subplots(1, len(shown) + 1, width_ratios=[1.0] * len(shown) + [1.15])
    sizes = sorted({curve.size[group.axes[0]] for group in shown for curve in group.curves})
    ramp = colormaps["viridis"]
    colors = {size: ramp(0.88 * place / max(1, len(sizes) - 1)) for place, size in enumerate(sizes)}
    for number, (panel, group) in enumerate(zip(panels, shown, strict=True)):
        _draw_curves(panel, group, colors)
        panel.set_title(group.name)
        panel.set_ylim(_limits(shown))
        if number:
            panel.tick_params(labelleft=False)
    panels[0].set_ylabel("validation NLL (nats)")
    _draw_laws(last, shown)
    key = AXES[shown[0].axes[0]]
    handles = [entry(f"{key} {size:,.0f}", color, linewidth=1.8) for size, color in colors.items()]
    looks = [*FIXED.values(), *OTHERS]
    handles += [mark_entry(group.name, looks[place][1], 4.5, looks[place][0]) for place, group in enumerate(shown)]
    fitting_legend(figure, handles, 8, handlelength=1.4, columnspacing=1.3)
    return figure


def _limits(groups: Sequence[Group]) -> tuple[float, float]:
    """Return the NLLs shown: from the lowest to a fifth above the highest of the best."""
    best = [curve.best_nll for group in groups for curve in group.curves if math.isfinite(curve.best_nll)]
    low, high = min(best), max(best)
    return low - 0.03 * abs(low), high + 0.2 * abs(high)


def _draw_curves(ax: Axes, group: Group, colors: dict[float, tuple[float, ...]]) -> None:
    axis, (low, high) = group.axes[0], _limits([group])
    for curve in group.curves:
        color = colors[curve.size[axis]]
        line = median_line(curve.table)
        ax.plot(line.index, line.where(np.isfinite(line)), color=color, zorder=3)
        for rate, row in curve.table.iterrows():
            values = [value for value in row if math.isfinite(value) and value <= high]
            dots(ax, [rate] * len(values), values, "o", color, 3)
        if not curve.best.open:
            ax.plot([curve.best.lr] * 2, [low, low + 0.12 * (high - low)], color=color, linewidth=1.2, clip_on=False)
    lr_axis(ax, [rate for curve in group.curves for rate in curve.table.index], most=4)
    ax.set_xlabel("learning rate")


def _draw_laws(ax: Axes, groups: Sequence[Group]) -> None:
    axis = groups[0].axes[0]
    for (color, marker), group in zip([*FIXED.values(), *OTHERS], groups, strict=False):
        known = [curve for curve in group.curves if not curve.best.open]
        for curve in known:
            ends = [10 ** (curve.best.log_lr + sign * curve.best.error) for sign in (-1, 1)]
            ax.plot([curve.size[axis]] * 2, ends, color=color, linewidth=0.9)
        dots(ax, [curve.size[axis] for curve in known], [curve.best.lr for curve in known], marker, color, 5)
        if (law := group.law) is not None:
            draw_law(ax, law, group.curves[-1].size, color)
        if (earlier := fit_law_of(group.curves[:-1])) is not None:
            foretold = 10 ** earlier.predict(group.curves[-1].size)[0]
            mark(ax, group.curves[-1].size[axis], foretold, "x", color, 6, markeredgewidth=1.3, zorder=5)
    set_size_axes(ax, sorted({curve.size[axis] for group in groups for curve in group.curves}), AXES[axis])
    ax.set_ylabel("best learning rate")
    if all(curve.best.open for group in groups for curve in group.curves):  # a logarithmic axis needs a value
        ax.set_ylim(1e-4, 1)
        ax.set_yticks([])
        say_instead(ax, "none lies inside the grid")


def draw_law(ax: Axes, law: Law, largest: Size, color: Any) -> None:
    """Draw a law of one size with its 80 % interval, from the smallest size to twice the largest.

    Args:
        ax: the panel, with logarithmic axes.
        law: the law, of learning rates.
        largest: the largest size.
        color: of line and shade.
    """
    (axis,) = law.axes
    x = np.geomspace(law.origin[axis], 2 * largest[axis], 40)
    found = [law.predict((*largest[:axis], each, *largest[axis + 1 :])) for each in x]
    middle, half = np.array([each for each, _ in found]), np.array([each for _, each in found])
    ax.plot(x, 10**middle, color=color, linewidth=1.1, linestyle=(0, (4, 2)))
    if np.isfinite(half).all():
        ax.fill_between(x, 10 ** (middle - half), 10 ** (middle + half), color=color, alpha=0.13, linewidth=0)


def set_size_axes(ax: Axes, sizes: Sequence[float], name: str) -> None:
    """Set logarithmic axes of sizes, to twice the largest, and of learning rates.

    Args:
        ax: the panel.
        sizes: the ticks, ascending.
        name: the size's name.
    """
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator([*sizes, 2 * sizes[-1]]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: lr_text(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(name)
    ax.tick_params(axis="x", labelrotation=30)
