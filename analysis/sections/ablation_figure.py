"""Draw the figure beside an ablation's table: validation NLL against each setting, seeds as points."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.drawing import pieces
from analysis.drawing.pieces import Pieces, shown
from analysis.drawing.style import INK, WIDTH_INCHES, Look, looks
from analysis.drawing.typeset import Table
from analysis.sections.ablation import Ablation, Group, ablation_tables, ablations, directions
from analysis.sections.nll_figures import CROSS
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, pictures
from analysis.study.load import Study

PANELS_PER_ROW = 3
CAPTION = (
    "Validation NLL against one setting at a time, the others at the base's, whose value has the ring. Points: "
    "seeds; line: their median; ×: diverged runs of all runs there."
)


def figures(study: Study) -> Figures:
    """Draw one figure for each base with a finite NLL, "ablation-0" and on."""
    drawn = [_figure(each, looks(study)[each.base]) for each in ablations(study)]
    return {f"ablation-{index}": Captioned(each, CAPTION) for index, each in enumerate(drawn) if each is not None}


def applies(study: Study) -> bool:
    return is_of_rates(study) and bool(ablations(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    return [*ablation_tables(study), *directions(study)]


def body(study: Study, drawn: Drawn) -> Pieces:
    said = pieces.boxed(directions(study))
    return pieces.heading("One setting at a time") + shown(ablation_tables(study)) + pictures(drawn) + said


def _figure(ablation: Ablation, look: Look) -> Figure | None:
    """Draw one panel for each setting of an ablation; None where no run has a finite NLL."""
    if not any(math.isfinite(group.best) for group in ablation.groups):
        return None
    lines, columns = math.ceil(len(ablation.groups) / PANELS_PER_ROW), min(PANELS_PER_ROW, len(ablation.groups))
    figure = Figure(figsize=(WIDTH_INCHES * (0.25 + 0.25 * columns), 2.3 * lines), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns, sharey=True, squeeze=False)).ravel()
    for index, (ax, group) in enumerate(zip(axes, ablation.groups, strict=False)):
        _panel(ax, group, look)
        if index % columns == 0:
            ax.set_ylabel("validation NLL (nats)")
    for ax in axes[len(ablation.groups) :]:
        ax.remove()
    return figure


def _panel(ax: Axes, group: Group, look: Look) -> None:
    """Draw one setting's NLLs, positive numbers on a log axis, other values side by side."""
    log = group.numeric and all(column.value > 0 for column in group.columns)
    places = [float(column.value) if group.numeric else float(index) for index, column in enumerate(group.columns)]
    medians = [column.median if math.isfinite(column.median) else math.nan for column in group.columns]
    ax.plot(
        places,
        medians,
        color=look.color,
        zorder=3,
        linestyle="-" if group.numeric else "none",
        marker="" if group.numeric else "_",
        markersize=14,
    )
    for place, column, median in zip(places, group.columns, medians, strict=True):
        finite = column.by_seed[np.isfinite(column.by_seed)]
        ax.plot(
            [place] * len(finite),
            finite,
            look.marker,
            color=look.color,
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=4,
        )
        if diverged := int(np.isinf(column.by_seed).sum()):
            ax.plot(place, 0.965, color=look.color, transform=ax.get_xaxis_transform(), zorder=5, **CROSS)
            ax.text(
                place,
                0.92,
                f"{diverged}/{len(column.by_seed)}",
                transform=ax.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=6,
                color=look.color,
            )
        if column.value == group.base_value:
            ax.plot(
                place,
                median,
                "o",
                markersize=9,
                markerfacecolor="none",
                markeredgecolor=INK,
                markeredgewidth=0.9,
                zorder=5,
            )
    if log:
        ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(places, [column.text for column in group.columns])
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(group.heading)


SECTION = Section(body, applies, figures, tables)
