"""Show how attention's largest logit grows with learning rate and size, and where it passes a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.marks import dots, entry, mark, mechanism_legend
from analysis.drawing.style import FIXED, MUTED, OTHERS, WIDTH_INCHES, fitting_legend, looks, lr_axis
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.logit_growth import (
    LATE_ROWS,
    LIMIT,
    Growth,
    find_back_test,
    find_growth,
    find_growths,
    fit_passing,
    read_logits,
)
from analysis.numbers.size_laws import AXES
from analysis.numbers.transfer import Group, find_groups, has_sizes
from analysis.sections.section import Captioned, Figures, Section, has_logged, list_one, make_body, make_printer
from analysis.sections.training_edge import upper_edge
from analysis.sections.transfer_figures import draw_law, set_size_axes
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.words import power

TITLE, NAME, COLUMN = "How attention’s logits grow", "attention-logits", "attention_logit_max"
MOST_PANELS = 2
VALUE = f"Largest attention logit at the end of training (median of the last {LATE_ROWS} logged steps)"
PREDICTED = " Predicted: by the law of the sizes above, with its 80 % interval."
CAPTION = f"{VALUE} against learning rate. Points: seeds; line: their median; dashed: 10⁴."
SIZES_CAPTION = (
    f"{VALUE} against learning rate, a colour for each size. Points: seeds; line: their median; dashed: 10⁴, above "
    "which all runs of Wortsman et al. (2023) diverged."
)
PASSING_CAPTION = (
    " Right: the rate at which it passes 10⁴, with its standard error. Line and shade: the law and its 80 % interval, "
    "to twice the largest size. Cross: what the law of the smaller sizes says of the largest."
)


applies = has_logged("activations", COLUMN)


@once_per_study
def of_sizes(study: Study) -> list[tuple[Group, list[Growth]]]:
    """Return each group with its growth at every size; [] in a study without sizes."""
    return [(group, find_growths(group)) for group in find_groups([study])] if has_sizes(study) else []


def table(study: Study) -> Table:
    """Return a row per group and size with the rate of passing, and one for twice the largest size."""
    rows, predicted = [], ""
    for group, found in of_sizes(study):
        twice = _predict(group, found)
        rows += [_row(study, growth) for growth in found] + ([twice] if twice else [])
        predicted = PREDICTED if twice else predicted
    if not rows:
        rows = [_row(study, find_growth(study, series)) for series in study.series]
    caption = (
        f"{VALUE}: the learning rate from which it is above 10⁴, interpolated between the swept rates, mean over "
        f"seeds; below it the standard error, in decades. Beside it the upper edge of the stable window.{predicted}"
    )
    return Table(TITLE, caption, ("mechanism", "passes 10⁴ at LR", "window’s upper edge"), tuple(rows))


def _row(study: Study, growth: Growth) -> tuple[Cell, ...]:
    passing = Cell("--", growth.reason)
    if not growth.reason:
        passing = Cell(power(10**growth.log_lr), f"± {growth.error:.2f}")
    return Cell(growth.series), passing, upper_edge(study, growth.series)


def _predict(group: Group, found: Sequence[Growth]) -> tuple[Cell, ...] | None:
    """Return the row of twice the largest size; None without a law of one axis."""
    law = fit_passing(found)
    if law is None or len(law.axes) != 1:
        return None
    (axis,), largest = law.axes, group.curves[-1].size
    size = (*largest[:axis], 2 * largest[axis], *largest[axis + 1 :])
    value, half = law.predict(size)
    interval = f"{power(10 ** (value - half))} to {power(10 ** (value + half))}" if math.isfinite(half) else ""
    return Cell(f"{group.describe(size)}, predicted"), Cell(power(10**value), interval), Cell("--")


def sentences(study: Study) -> list[str]:
    """Return the law of each group with its back-test."""
    said = []
    for group, found in of_sizes(study):
        law, tried = fit_passing(found), find_back_test(found)
        if law is None or len(law.axes) != 1:
            continue
        slope, half = law.slope(0)
        within = f" (80 %: {slope - half:+.2f} to {slope + half:+.2f})" if math.isfinite(half) else ""
        text = f"{group.name}: the rate at which attention's logits pass 10⁴ changes by {slope:+.2f} decades{within}"
        text += f" with each doubling of {AXES[law.axes[0]]}."
        if tried is not None:
            text += (
                f" Back-test: the smaller sizes say {power(10**tried.said)} for {group.describe(tried.size)}, and it "
                f"is {power(10**tried.found)} ({tried.error:+.2f} decades; the last size's own rate: "
                f"{tried.neighbour - tried.found:+.2f})."
            )
        said.append(text)
    return said


def figures(study: Study) -> Figures:
    found = [(group, own) for group, own in of_sizes(study) if len(group.axes) == 1]
    if found:
        found = found[:MOST_PANELS]
        passing = PASSING_CAPTION if _passes(found) else ""
        return {NAME: Captioned(_draw_sizes(found), SIZES_CAPTION + passing)}
    figure, styles = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained"), looks(study)
    ax = figure.subplots()
    drawn = {name: look for name, look in styles.items() if _draw_logits(ax, read_logits(study, name), look.color)}
    _set_axes(ax, study.runs["lr"])
    mechanism_legend(figure, drawn)
    return {NAME: Captioned(figure, CAPTION)}


def _passes(found: Sequence[tuple[Group, Sequence[Growth]]]) -> bool:
    """Return whether a rate of passing is known; a panel without one has no scale."""
    return any(not growth.reason for _, own in found for growth in own)


def _draw_sizes(found: Sequence[tuple[Group, Sequence[Growth]]]) -> Figure:
    axis = found[0][0].axes[0]
    sizes = sorted({growth.size[axis] for _, own in found for growth in own})
    colors = {size: colormaps["viridis"](0.88 * at / max(1, len(sizes) - 1)) for at, size in enumerate(sizes)}
    figure = Figure(figsize=(WIDTH_INCHES, 2.9), layout="constrained")
    panels = list(figure.subplots(1, len(found) + _passes(found), squeeze=False).ravel())
    last = panels.pop() if _passes(found) else None
    for ax, (group, own) in zip(panels, found, strict=True):
        for growth in own:
            _draw_logits(ax, growth.table, colors[growth.size[axis]])
        _set_axes(ax, [lr for growth in own for lr in growth.table.index])
        ax.set_title(group.name)
    if last is not None:
        _draw_passing(last, found, axis, sizes)
    handles = [entry(f"{AXES[axis]} {size:,.0f}", color, linewidth=1.8) for size, color in colors.items()]
    fitting_legend(figure, handles, 8, handlelength=1.4, columnspacing=1.3)
    return figure


def _draw_logits(ax: Axes, table: Frame, color: Any) -> bool:
    """Draw one line with its seeds' points; return whether there was one."""
    values = table.where(np.isfinite(table))
    line = values.median(axis=1).dropna()
    ax.plot(line.index, line.to_numpy(), color=color, linewidth=1.2)
    for seed in values:
        dots(ax, values.index, values[seed], "o", color, 3)
    return len(line) > 0


def _set_axes(ax: Axes, lrs: Any) -> None:
    ax.axhline(LIMIT, color=MUTED, linewidth=0.8, linestyle="--")
    ax.set_yscale("log")
    lr_axis(ax, lrs, most=4)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("largest attention logit")


def _draw_passing(ax: Axes, found: Sequence[tuple[Group, Sequence[Growth]]], axis: int, sizes: Sequence[float]) -> None:
    for (color, marker), (group, own) in zip([*FIXED.values(), *OTHERS], found, strict=False):
        known = [growth for growth in own if not growth.reason]
        for growth in known:
            ends = [10 ** (growth.log_lr + sign * growth.error) for sign in (-1, 1)]
            ax.plot([growth.size[axis]] * 2, ends, color=color, linewidth=0.9)
        dots(ax, [each.size[axis] for each in known], [10**each.log_lr for each in known], marker, color, 5)
        if (law := fit_passing(own)) is not None:
            draw_law(ax, law, group.curves[-1].size, color)
        if (tried := find_back_test(own)) is not None:
            mark(ax, tried.size[axis], 10**tried.said, "x", color, 6, markeredgewidth=1.3, zorder=5)
    set_size_axes(ax, sizes, AXES[axis])
    ax.set_ylabel("passes $10^4$ at learning rate")


TABLES = list_one(table)
BODY = make_body(TITLE, TABLES, sentences)
SECTION = Section(BODY, applies, figures, make_printer(TABLES, sentences), BODY)
