"""Draw validation NLL against learning rate and the stable windows, and order their section."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Affine2DBase, AffineDeltaTransform, ScaledTranslation, blended_transform_factory

from analysis.drawing.marks import dots, entry, mark, mark_entry, mechanism_legend
from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, Look, looks, lr_axis
from analysis.drawing.tables import limits, width_text
from analysis.drawing.typeset import Table
from analysis.measures import outcome_of
from analysis.numbers.ablations import tells_all
from analysis.numbers.common_windows import common_windows, widths_by_threshold
from analysis.numbers.learning import unlearned_words
from analysis.numbers.optimizers import compares_optimizers_alone
from analysis.numbers.windows import (
    TOLERANCE,
    VALIDATION,
    SeriesWindows,
    Window,
    is_any_finite,
    median_line,
    outcomes,
    windows,
)
from analysis.sections.edge import edge_tables
from analysis.sections.nll import nll_tables, sensitivity_table, window_table
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, make_printer
from analysis.sections.throughput import throughput_table
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.reference import compares_losses, frequency_nll, unlearned
from stability.runs.words import LEARNED_NOTHING

WINDOW_CAPTION = (
    "{widths} of the stable windows of the median line{bars}; whisker: widths that the grid's rates allow without "
    "interpolation; arrow: open, a lower bound."
)
WIDTH_CAPTION = (
    " Right: width against the largest NLL admitted, from each best NLL to the {baseline_nll}; dotted: a lower bound"
)
BOTH = ": thick, the own window; thin, the common one. Number: both; points: single seeds, own"
OWN_ALONE = ", each one's own. Points: single seeds"


def window_figure(study: Study) -> Figure | None:
    """Draw the widths of own and common windows, and width against NLL; None without a window or for a single LR.

    Losses of different units have no common axis of NLL.
    """
    found = {name: each for name, each in windows(study).items() if each.median is not None}
    if not found or study.runs["lr"].nunique() < 2:
        return None
    styles, lacking = looks(study), unlearned_words(study)
    figure = Figure(figsize=(WIDTH_INCHES, max(2.1, 0.75 + 0.3 * len(found))), layout="constrained")
    ratios = (1,) if compares_losses(study) else (1.25, 1)
    ax, *curves = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios, gridspec_kw={"wspace": 0.18})[0]
    for row, (name, each) in enumerate(found.items()):
        if lacking[name]:
            ax.text(0.0, row, f" {lacking[name]}", va="center", fontsize=8, color=MUTED)
        else:
            _width_bars(ax, row, each, common_windows(study).get(name), styles[name])
    ax.set_yticks(range(len(found)), list(found))
    ax.set_ylim(len(found) - 0.45, -0.55)
    ax.set_xlim(0, _span([each for name, each in found.items() if not lacking[name]]))
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_xlabel("width of the stable window (decades)")
    for each in curves:
        _width_curves(each, study, styles)
    return figure


def _span(found: list[SeriesWindows]) -> float:
    """Return the end of the axis: the largest width, or its bound by the measured rates."""
    bounds = [bound for each in found if each.median for bound in (each.median.width, each.median.bracket[1])]
    seeds = [width for each in found for width in each.seed_widths]
    return max(1.08 * max([each for each in (*bounds, *seeds) if math.isfinite(each)], default=0.0), 0.3)


def _width_bars(ax: Axes, row: int, each: SeriesWindows, common: SeriesWindows | None, style: Look) -> None:
    """Draw one series' own and common width as bars, with seeds, whiskers and an arrow for an open window."""
    found = each.median
    assert found is not None, "series without a window are left out"
    ax.barh(row - 0.1, found.width, height=0.36, color=style.color, alpha=0.8, zorder=2)
    text = width_text(found)
    if common is not None and common.median is not None:
        ax.barh(row + 0.22, common.median.width, height=0.14, color=style.color, alpha=0.45, zorder=2)
        text += f" / {width_text(common.median)}"
    low, high = found.bracket
    if math.isfinite(high):
        ax.plot([low, high], [row - 0.1] * 2, color=INK, linewidth=0.8, marker="|", markersize=5, zorder=3)
    else:
        arrow = {"arrowstyle": "<-", "color": style.color, "linewidth": 1.6}
        ax.annotate("", (found.width, row - 0.1), xytext=(16, 0), textcoords="offset points", arrowprops=arrow)
    seeds = sorted(each.seed_widths) if len(each.by_seed) > 1 else []
    spots = np.linspace(-0.22, 0.02, len(seeds)) if len(seeds) > 1 else [-0.1] * len(seeds)
    dots = {"markersize": 2.6, "markeredgecolor": "white", "markeredgewidth": 0.4, "clip_on": False}
    ax.plot(seeds, [row + spot for spot in spots], "o", color=INK, zorder=4, **dots)
    beside = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    ax.annotate(text, (1.01, row), va="center", fontsize=8, color=INK, **beside)


def _width_curves(ax: Axes, study: Study, styles: dict[str, Look]) -> None:
    """Draw each trained series' window width against the largest NLL admitted."""
    for name, line in widths_by_threshold(study).items():
        exact, style = line["width"].where(~line["is_bound"]), styles[name]
        ax.plot(line["threshold"], line["width"], color=style.color, linewidth=1.0, linestyle=(0, (1, 1.2)))
        ax.plot(line["threshold"], exact, color=style.color, linewidth=1.4, linestyle=style.dashes)
    limits = {round(each.median.threshold_nll, 6) for each in common_windows(study).values() if each.median is not None}
    for limit in limits:
        ax.axvline(limit, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"largest {'NLL' if wording.nats(study) else 'loss'} inside{wording.nats(study)}")
    ax.set_ylabel("width (decades)")


ONE_RATE = "A single learning rate makes neither a curve nor a stable window, so none are compared."
NLL, WINDOW = "nll", "window"
# A count such as 2/2 needs this much room beside its neighbour.
MARK_POINTS = 9.0
BELOW_POINTS = 3.5  # from a cross to its count
CROSS = {"marker": "x", "markersize": 5.5, "markeredgewidth": 1.5, "linestyle": "none", "clip_on": False}


def nll_figure(study: Study, column: str = VALIDATION, series: Sequence[str] = ()) -> Figure | None:
    """Draw NLL (validation or generative) against LR with the stable windows as bars beneath.

    Series with losses of different units have a panel each.

    Args:
        study: the study.
        column: the NLL's column.
        series: the curves, for a lower figure; by default all.

    Returns:
        None without a finite NLL, or for a single LR.
    """
    tables = {name: outcomes(study, name, column) for name in series or study.series}
    if study.runs["lr"].nunique() < 2 or not is_any_finite(tables.values()):
        return None
    every_look, every_window = looks(study), windows(study, column=column)
    styles, found = {name: every_look[name] for name in tables}, {name: every_window[name] for name in tables}
    known = {name: table for name, table in tables.items() if is_any_finite([table])}
    groups = [{name: table} for name, table in known.items()] if compares_losses(study) else [tables]
    row = 0.2 if len(tables) < 6 and not series else 0.14  # inches
    curves = max(0.5, 2.6 / len(groups)) if len(groups) > 1 else 2.15 if not series else 1.5
    around = 0.35 if not series else 0.55  # legend and labels, which take more of a lower figure
    size = (WIDTH_INCHES, around + curves * len(groups) + row * len(tables))
    figure = Figure(figsize=size, layout="constrained")
    heights = (*[curves] * len(groups), 0.2 + row * len(tables))
    *panels, bars = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _window_bars(bars, study, found, common_windows(study, column), styles)
    lr_axis(bars, study.runs["lr"])
    bars.set_xlabel(wording.rate_axis(study))
    panels[len(panels) // 2].set_ylabel(outcome_of(study, column).axis)
    extras: dict[Any, Line2D] = {}
    for ax, own in zip(panels, groups, strict=True):
        runs = study.runs[study.runs["series"].isin(own if compares_losses(study) else study.series)]
        nll_limits(ax, own, unigram := _median_level(study, runs) if column == VALIDATION else math.nan)
        for name, table in own.items():
            nll_line(ax, table, styles[name])
        if math.isfinite(unigram):
            _unigram(ax, study, runs)
        ax.tick_params(axis="x", length=0, labelbottom=False)
        top_marks(ax, own, styles)
        extras |= {each.get_label(): each for each in nll_extras(own, ax)}
    mechanism_legend(figure, styles, list(extras.values()))
    return figure


def nll_caption(study: Study, figure: Figure) -> str:
    """Describe the marks that `nll_figure` has drawn."""
    found = [each.median for each in windows(study).values() if each.median is not None]
    own, of_reference = limits(study, study.series, "its")
    has_diverged = bool((study.runs["status"] == "diverged").any())
    marks = [
        "Points: seeds; line: their median" + (", broken where half of them or more diverged" if has_diverged else ""),
        "×: number of diverged runs of all runs there" if has_diverged else "",
    ]
    bars = [
        f"thick, own window, {own}",
        f"thin, common window, {of_reference}" if common_windows(study) else "",
        "pale, rates within 5 % of its best NLL that lost half of the learning, not counted"
        if any(each.is_capped for each in found)
        else "",
        "whisker, the swept rates beside an edge",
        "arrow, open: a lower bound" if any(each.open_low or each.open_high for each in found) else "",
    ]
    below = f" Below: {'; '.join(filter(None, bars))}." if len(figure.axes) > 1 else ""
    units = " Each loss has a unit of its own." if compares_losses(study) else ""
    return (
        f"Validation NLL at the end of training against learning rate. {'; '.join(filter(None, marks))}.{units}{below}"
    )


def nll_limits(ax: Axes, tables: dict[str, Frame], unigram: float) -> None:
    """Set the y limits from the best run to the worst, with a cap.

    The cap is the best run's NLL plus twice its distance to the token-frequency NLL. The token-frequency NLL is inside
    the limits if near.

    Args:
        ax: the axes.
        tables: NLLs by series, learning rate × seed.
        unigram: token-frequency NLL in nats, or NaN.
    """
    finite = np.concatenate([table.to_numpy(dtype=float).ravel() for table in tables.values()])
    finite = finite[np.isfinite(finite)]
    low, high = float(finite.min()), float(finite.max())
    if math.isfinite(unigram):
        # if little was learned, the runs' differences are small too
        least = 0.15 if unigram - low > TOLERANCE * abs(low) else TOLERANCE
        high = min(high, low + max(2 * (unigram - low), least * abs(low)))
        # Far above the models, the token-frequency line would flatten their curves; it is named above the axis instead.
        high = max(high, unigram) if unigram < low + 3 * (high - low) else high
    room = max(high - low, 0.02)
    # The strip at the top is reserved for crosses.
    ax.set_ylim(low - 0.06 * room, high + 0.16 * room)


def nll_line(ax: Axes, table: Frame, style: Look) -> None:
    """Draw one series: the median over seeds as a line, and a point for each run within the axis.

    Args:
        ax: the axes.
        table: NLLs, learning rate × seed.
        style: the series' style.
    """
    line = median_line(table)
    inside = line.where(np.isfinite(line))
    ax.plot(inside.index, inside, color=style.color, linestyle=style.dashes, zorder=3)
    top = ax.get_ylim()[1]
    for lr, row in table.iterrows():
        shown = [value for value in row if math.isfinite(value) and value <= top]
        dots(ax, [lr] * len(shown), shown, style.marker, style.color)


def top_marks(
    ax: Axes, tables: dict[str, Frame], styles: dict[str, Look], width_inches: float = 0.85 * WIDTH_INCHES
) -> None:
    """Mark at the top edge, side by side: diverged runs by a cross with count, runs above the axis by a triangle.

    Args:
        ax: the axes.
        tables: NLLs by series, learning rate × seed.
        styles: looks by series.
        width_inches: approximate width of the axes; no mark lies beyond it.
    """
    strip, top = blended_transform_factory(ax.transData, ax.transAxes), ax.get_ylim()[1]
    lrs = sorted({lr for table in tables.values() for lr in table.index})
    places, width = _points_from_left(ax, lrs, width_inches), 72 * width_inches
    # the axes' true width is known only after the layout
    of_the_axes = AffineDeltaTransform(cast(Affine2DBase, ax.transAxes))
    # marks at the ends are moved inwards, onto the axes
    between = float(np.diff(places).min(initial=width))
    margin = min(places[0], width - places[-1])
    room = min(between, 2 / 3 * (margin + between), width / len(places))
    for lr, at in zip(lrs, places, strict=True):
        rows = {name: table.loc[lr].dropna() for name, table in tables.items() if lr in table.index}
        marked = {name: row for name, row in rows.items() if (row > top).any()}
        step = min(12.5, room / max(len(marked), 1))
        half = step * len(marked) / 2
        left = min(max(at - half, 0), width - 2 * half)
        for index, (name, row) in enumerate(marked.items()):
            color, diverged = styles[name].color, int(np.isinf(row).sum())
            aside = left + (index + 0.5) * step - at
            place = strip + ScaledTranslation(aside / width, 0, of_the_axes)
            if diverged:
                ax.plot(lr, 0.965, color=color, transform=place, zorder=5, **CROSS)
            else:
                mark(ax, lr, 0.965, "^", color, 5, markerfacecolor="none", transform=place, clip_on=False)
            if diverged and step >= MARK_POINTS:
                below = place + ScaledTranslation(0, -BELOW_POINTS / 72, ax.figure.dpi_scale_trans)
                ax.text(lr, 0.965, f"{diverged}/{len(row)}", transform=below, ha="center", va="top", fontsize=6,
                        color=color)  # fmt: skip


def _points_from_left(ax: Axes, lrs: Sequence[float], width_inches: float) -> list[float]:
    """Return the rates' distances in points from the left end of axes this wide."""
    low, high, *places = ax.xaxis.get_transform().transform(np.array([*ax.get_xlim(), *lrs]))
    return [float((place - low) / (high - low)) * width_inches * 72 for place in places]


def _median_level(study: Study, runs: Frame) -> float:
    """Return the median NLL without learning of some runs; NaN if not recorded."""
    if wording.words(study).in_nats:
        return frequency_nll(runs)
    return float(np.median([unlearned(study, name).nll for name in set(runs["series"])]))


def _levels(study: Study, runs: Frame) -> dict[float, str]:
    """Return each NLL without learning of some runs, and the models that reach it."""
    words = wording.words(study)
    if words.in_nats:
        return {round(value, 3): words.baseline for value in runs["unigram_nll"] if math.isfinite(value)}
    found = [unlearned(study, name) for name in set(runs["series"])]
    return {round(each.nll, 3): each.name.removeprefix("the ") for each in found if math.isfinite(each.nll)}


def _unigram(ax: Axes, study: Study, runs: Frame) -> None:
    """Draw the NLL of training-token frequencies on the validation examples: a line for each value.

    It is the NLL of a model without context; of a loss that is no NLL, that of `unlearned`.
    """
    low, high = ax.get_ylim()
    for unigram, name in sorted(_levels(study, runs).items()):
        inside = low < unigram < high
        if inside:
            ax.axhline(unigram, color=MUTED, linestyle=(0, (4, 3)), linewidth=0.9, zorder=2)
        # Outside the axes, where no curve can run into it.
        label = f"{LEARNED_NOTHING}:\n{name.replace(' ', chr(10))}" + (
            "" if inside else f"\n{unigram:.2f} {'↑' if unigram > high else '↓'}"
        )
        at = min(max(unigram, low), high)
        side = "center" if inside else "top" if unigram > high else "bottom"
        spot: dict[str, Any] = {"xy": (1.008, at), "xycoords": ("axes fraction", "data"), "annotation_clip": False}
        ax.annotate(label, **spot, fontsize=7.5, color=MUTED, linespacing=0.95, va=side)


def _window_bars(
    ax: Axes, study: Study, own: dict[str, SeriesWindows], common: dict[str, SeriesWindows], styles: dict[str, Look]
) -> None:
    """Draw a thick bar per series over its own window and a thin one over the common window."""
    lacking = unlearned_words(study)
    for row, (name, each) in enumerate(own.items()):
        ax.axhline(row, color="#eef0f2", linewidth=0.8, zorder=0)
        if each.median is None:
            continue
        color = styles[name].color
        if lacking[name]:
            ax.text(each.median.grid[0], row, lacking[name], va="center", fontsize=7, color=MUTED)
            continue
        if each.median.is_capped:
            _bar(ax, each.median.uncounted, row - 0.14, color, 4, 0.25)
        _bar(ax, (each.median.low.lr, each.median.high.lr), row - 0.14, color, 4, 0.85)
        _bar_ends(ax, each.median, row - 0.14, color, 4)
        beside = common.get(name)
        if beside is not None and beside.median is not None and not beside.median.is_empty:
            _bar(ax, (beside.median.low.lr, beside.median.high.lr), row + 0.24, color, 1.8, 0.7)
            _bar_ends(ax, beside.median, row + 0.24, color, 2.6)
    ax.set_yticks(range(len(own)), list(own))
    ax.set_ylim(len(own) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_ylabel("stable\nwindow", fontsize=8)
    told = "thick: own window" + ("\nthin: common window" if common else "")
    ax.annotate(told, (1.008, 0.5), xycoords="axes fraction", fontsize=7, color=MUTED, linespacing=0.95, va="center")


def _bar(ax: Axes, ends: tuple[float, float], row: float, color: str, width: float, alpha: float) -> None:
    ax.plot(ends, [row, row], color=color, linewidth=width, solid_capstyle="butt", alpha=alpha)


def _bar_ends(ax: Axes, found: Window, row: float, color: str, size: float) -> None:
    """Draw each edge's bracket as a whisker, and an open end as an arrow."""
    for is_open, edge, marker in ((found.open_low, found.low, "<"), (found.open_high, found.high, ">")):
        if is_open:
            mark(ax, edge.lr, row, marker, color, 1.4 * size, clip_on=False, zorder=4)
        else:
            bracket = [edge.inside_lr, edge.outside_lr]
            ax.plot(bracket, [row, row], color=INK, linewidth=0.18 * size, marker="|", markersize=size, zorder=4)


def nll_extras(tables: dict[str, Frame], ax: Axes) -> list[Line2D]:
    """Return the legend's entries for divergence and for runs above the axis, if present."""
    values = np.concatenate([table.to_numpy(dtype=float).ravel() for table in tables.values()])
    extras = []
    if np.isinf(values).any():
        extras.append(entry("diverged", **CROSS))
    if (values[np.isfinite(values)] > ax.get_ylim()[1]).any():
        extras.append(mark_entry("above the axis", "^", 5, markerfacecolor="none"))
    return extras


def applies(study: Study) -> bool:
    """Return whether the study compares rates beyond its ablation tables."""
    return is_of_rates(study) and not tells_all(study)


def figures(study: Study) -> Figures:
    curves = None if compares_optimizers_alone(study) else nll_figure(study)  # drawn in the optimizers' own section
    is_alone, has_common = compares_losses(study), bool(common_windows(study))
    caption = WINDOW_CAPTION.format(
        widths="Widths" if is_alone else "Left: widths", bars=BOTH if has_common else OWN_ALONE
    )
    if not is_alone:
        limit = "; vertical line: the limit of the common windows." if has_common else "."
        caption += WIDTH_CAPTION.format(baseline_nll=wording.words(study).baseline_nll) + limit
    drawn = {} if curves is None else {NLL: Captioned(curves, nll_caption(study, curves))}
    window = window_figure(study)
    return drawn if window is None else drawn | {WINDOW: Captioned(window, caption)}


def _tables(study: Study) -> list[Table]:
    """Return the tables of NLLs and windows; only the windows if each mechanism chose its own rates.

    A table of such rates is mostly empty, and the edges' figure shows them all. A single rate has no windows.
    """
    nlls = [] if edge_tables(study) else nll_tables(study)
    return nlls if study.runs["lr"].nunique() < 2 else [*nlls, window_table(study)]


def _say_one_rate(study: Study) -> list[str]:
    return [ONE_RATE] if study.runs["lr"].nunique() < 2 else []


def body(study: Study, drawn: Drawn) -> Pieces:
    """Return the section: the curves, or the reason for their absence, then tables and widths of the windows."""
    missing = (
        "The optimizers' own section draws the curves, over each one's reference rate."
        if compares_optimizers_alone(study)
        else ONE_RATE
        if study.runs["lr"].nunique() < 2
        else "No run ended with a finite validation NLL: there is neither a curve nor a stable window to draw."
    )
    # with `lr=edge` the rates cluster at the edges, and a mean over rates would mostly describe these
    sensitive = None if edge_tables(study) else sensitivity_table(study)
    head = heading("Validation NLL and the stable window") + drawn.get(NLL, paragraph(missing))
    below = shown([throughput_table(study), sensitive])
    return head + shown(_tables(study)) + drawn.get(WINDOW, ()) + below


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the first table of NLLs and the widths, for variants also their sensitivities.

    The first page has best rates and windows.
    """
    sensitive = sensitivity_table(study) if (study.runs["variant"] != "").any() else None
    head = heading("Validation NLL and the stable window") + shown(_tables(study)[:1])
    return head + drawn.get(WINDOW, ()) + shown([sensitive])


SECTION = Section(body, applies, figures, make_printer(_tables, _say_one_rate), brief)
