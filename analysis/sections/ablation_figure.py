"""Draw the figure of an ablation's table: validation NLL against each setting, seeds as points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullLocator

from analysis.drawing import pieces
from analysis.drawing.marks import dots, mark
from analysis.drawing.pieces import Pieces, shown
from analysis.drawing.style import INK, WIDTH_INCHES, Look, looks
from analysis.numbers.ablations import Ablation, Group, ablations
from analysis.sections.ablation import ablation_tables, directions
from analysis.sections.nll_figures import CROSS
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, make_printer, pictures
from analysis.study import wording
from analysis.study.load import Study

PANELS_PER_ROW = 3
TURNED_DEGREES, LABEL_GAP = 35, 3  # overlapping labels are turned; gap in pixels between labels
CAPTION = (
    "Validation NLL against one setting at a time, the others at the base's, whose value has the ring. Points: "
    "seeds; line: their median; ×: diverged runs of all runs there."
)


def figures(study: Study) -> Figures:
    """Draw one figure for each base with a finite NLL, "ablation-0" and on."""
    drawn = [_figure(each, looks(study), wording.nats(study)) for each in ablations(study)]
    return {f"ablation-{index}": Captioned(each, CAPTION) for index, each in enumerate(drawn) if each is not None}


def applies(study: Study) -> bool:
    return is_of_rates(study) and bool(ablations(study))


def body(study: Study, drawn: Drawn) -> Pieces:
    said = pieces.box(directions(study))
    return pieces.heading("One setting at a time") + shown(ablation_tables(study)) + pictures(drawn) + said


def _figure(ablation: Ablation, styles: Mapping[str, Look], unit: str) -> Figure | None:
    """Draw one panel for each setting of an ablation; None without a finite NLL; ``unit``: end of the label."""
    if not any(math.isfinite(group.best) for group in ablation.groups):
        return None
    lines, columns = math.ceil(len(ablation.groups) / PANELS_PER_ROW), min(PANELS_PER_ROW, len(ablation.groups))
    figure = Figure(figsize=(WIDTH_INCHES * (0.25 + 0.25 * columns), 2.3 * lines), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns, sharey=True, squeeze=False)).ravel()
    for index, (ax, group) in enumerate(zip(axes, ablation.groups, strict=False)):
        base = ablation.base if ablation.base in styles else group.columns[0].series
        _panel(ax, group, styles[base], styles)
        if index % columns == 0:
            ax.set_ylabel(f"validation {'NLL' if unit else 'loss'}{unit}")
    for ax in axes[len(ablation.groups) :]:
        ax.remove()
    _turn_labels(figure, lines)
    return figure


def _turn_labels(figure: Figure, lines: int) -> None:
    """Turn all lower labels if some overlap, and make the figure taller for them."""
    figure.draw_without_rendering()
    if not any(map(_overlap, figure.axes)):
        return
    flat = _label_height(figure)
    for label in _labels(figure):
        label.set(rotation=TURNED_DEGREES, ha="right", rotation_mode="anchor")
    taller = (_label_height(figure) - flat) / figure.dpi
    figure.set_figheight(figure.get_figheight() + lines * taller)


def _overlap(ax: Axes) -> bool:
    """Return whether two neighbouring labels of the x axis touch."""
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    boxes.sort(key=lambda box: box.x0)
    return any(one.x1 + LABEL_GAP > other.x0 for one, other in itertools.pairwise(boxes))


def _labels(figure: Figure) -> list[Text]:
    return [label for ax in figure.axes for label in ax.get_xticklabels()]


def _label_height(figure: Figure) -> float:
    """Return the height in pixels of the tallest label below a panel."""
    return max(label.get_window_extent().height for label in _labels(figure))


def _panel(ax: Axes, group: Group, look: Look, styles: Mapping[str, Look]) -> None:
    """Draw one setting's NLLs: positive numbers on a log axis, other values side by side.

    Each value has the colour of its series, a value that is a name also its marker. ``look`` is the base's.
    """
    log = group.numeric and all(column.value > 0 for column in group.columns)
    places = [float(column.value) if group.numeric else float(index) for index, column in enumerate(group.columns)]
    medians = [column.median if math.isfinite(column.median) else math.nan for column in group.columns]
    if group.numeric:
        ax.plot(places, medians, color=look.color, zorder=3)
    for place, column, median in zip(places, group.columns, medians, strict=True):
        color, marker = styles[column.series].color, look.marker if group.numeric else styles[column.series].marker
        if not group.numeric:
            ax.plot(place, median, "_", color=color, markersize=14, zorder=3)
        finite = column.by_seed[np.isfinite(column.by_seed)]
        dots(ax, [place] * len(finite), finite, marker, color, 4)
        if diverged := int(np.isinf(column.by_seed).sum()):
            strip = {"color": color, "transform": ax.get_xaxis_transform()}
            ax.plot(place, 0.965, zorder=5, **strip, **CROSS)
            ax.text(place, 0.92, f"{diverged}/{len(column.by_seed)}", ha="center", va="top", fontsize=6, **strip)
        if column.value == group.base_value:
            ring = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 0.9}
            mark(ax, place, median, "o", None, 9, zorder=5, **ring)
    if log:
        ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(places, [column.text for column in group.columns])
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(group.heading)


SECTION = Section(body, applies, figures, make_printer(ablation_tables, directions))
