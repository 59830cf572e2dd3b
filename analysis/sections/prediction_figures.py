"""Draw early α_max's prediction of broken runs (ROC curves), best rate and edge (ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims.prediction import EVENTS, TARGETS
from analysis.drawing.marks import dots, entry, legend_columns, mark, mark_entry
from analysis.drawing.style import DASHES, INK, MUTED, WIDTH_INCHES, mechanism_looks
from analysis.numbers.prediction import (
    POOLED,
    SAME_RATE,
    Predictor,
    Scored,
    best_baseline,
    select_judged,
    select_ranked,
    telling,
)
from analysis.numbers.ranking import Estimate, roc, shares_below
from analysis.study.load import Frame

ROW_INCHES = 0.17
GOLDEN_ANGLE = np.pi * (3 - np.sqrt(5))
# Dashes of the ROC curves by column: measured predictors black, baselines grey. Hues are those of mechanisms.
IN_ROC: dict[str, Any] = {
    **dict(zip(("alpha_max_ratio", "alpha_max", "critical_ratio", "sharpness"), DASHES, strict=True)),
    **dict(zip(("lr", "grad_norm", "loss"), DASHES, strict=False)),
}
SAMPLE = (-0.2, -0.05)  # place of a curve's dashes, left of every AUC
ROC_CAPTION = (
    "Telling runs that will break from those that will not, by what is known at step k. Left: ROC curves over the runs "
    "of which each is known, in the dashes beside the names on the right, baselines grey; of several sets of runs the "
    "mean of their curves, each by its number of pairs. Right: the area below, which is 0.5 "
    "for chance (dashed): large dot, all runs with the 95 % interval; hollow diamond, pairs of runs at the same "
    "rate (within 5 %); small marks, single mechanisms."
)
RANKS_CAPTION = (
    "Ranks of the curves (all rates of a series and seed) by what is predicted at step k against those by what came "
    "out, as shares of their number: 0.25 is above a quarter of them, equal values share their mean rank; on the "
    "dashed diagonal the order is right. Curves at one place stand around it. Left: the rate at which the early α_max "
    "falls below the rate itself; right: the best of the baselines. ρ: Spearman's with its 95 % interval."
)


def roc_figure(runs: Frame, scored: Mapping[str, Sequence[Scored]]) -> Figure | None:
    """Draw a row for each scored event: ROC curves, and every AUC with its interval; None without any."""
    known = {event: each for event, each in scored.items() if each}
    if not known:
        return None
    number = max(map(len, known.values()))
    height = max(2.2, 0.5 + ROW_INCHES * number)
    figure = Figure(figsize=(WIDTH_INCHES, 0.35 + height * len(known)), layout="constrained")
    grid = figure.subplots(len(known), 2, squeeze=False, width_ratios=(1, 1.15))
    styles = mechanism_looks(select_judged(runs)["mechanism"])
    for (left, right), (event, each) in zip(grid, known.items(), strict=True):
        frame = telling(runs, event)
        _curves(left, frame, each, event)
        _areas(right, each, styles)
        left.set_title(f"runs that {EVENTS[event]}: {int(frame[event].sum())} of {len(frame)}", loc="left")
    handles = [mark_entry(name, marker, color=color, alpha=0.75) for name, (color, marker) in styles.items()]
    handles += [
        entry("all runs", INK, marker="o", markersize=5, linewidth=1.2),
        mark_entry("same rate", "D", 4.5, color=INK, markerfacecolor="white"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns(handles), columnspacing=1.4)
    return figure


def _label(predictor: Predictor) -> str:
    """Return a predictor's name with α_max and α as mathematics."""
    return predictor.name.replace("α_max", r"$\alpha_\mathrm{max}$").replace("α", r"$\alpha$")


def _color(predictor: Predictor) -> str:
    return MUTED if predictor.is_baseline else INK


def _curves(ax: Axes, frame: Frame, scored: Sequence[Scored], event: str) -> None:
    """Draw the chosen predictors' ROC curves, each over the runs with a value."""
    ax.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
    for each in scored:
        column = each.predictor.column
        if column not in IN_ROC:
            continue
        known = frame[frame[column].notna()]
        false, true = roc(each.predictor.sign * known[column], known[event], list(known["stratum"]))
        is_baseline = each.predictor.is_baseline
        ax.plot(false, true, color=_color(each.predictor), linestyle=IN_ROC[column], label=_label(each.predictor),
                linewidth=1.1 if is_baseline else 1.6, zorder=2 if is_baseline else 3)  # fmt: skip
    ax.set_xlim(-0.03, 1.03)
    ax.set_ylim(-0.03, 1.03)
    ax.set_aspect("equal")
    ax.set_xlabel("share of the other runs alarmed")
    ax.set_ylabel("share of them alarmed")


def _areas(ax: Axes, scored: Sequence[Scored], styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw each predictor's AUC: over all runs with its interval, at the same rate, and by mechanism."""
    ax.axvline(0.5, color=MUTED, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
    for row, each in enumerate(scored):
        if each.predictor.column in IN_ROC:  # its curve's dashes, beside its name
            ax.plot(SAMPLE, [row, row], color=_color(each.predictor), linestyle=IN_ROC[each.predictor.column],
                    label=_label(each.predictor), linewidth=1.1)  # fmt: skip
        for name, (color, marker) in styles.items():
            if name in each.scopes and not np.isnan(each.scopes[name].value):
                faint = {"alpha": 0.75, "zorder": 3, "markeredgewidth": 0}
                mark(ax, each.scopes[name].value, row, marker, color, 3.4, clip_on=False, **faint)
        _interval(ax, each.scopes[POOLED], row, each.predictor)
        same = each.scopes[SAME_RATE].value
        if not np.isnan(same):
            hollow = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 0.8}
            mark(ax, same, row, "D", None, 4.2, zorder=4, clip_on=False, **hollow)
    first = next((row for row, each in enumerate(scored) if each.predictor.is_baseline), None)
    if first:
        ax.axhline(first - 0.5, color=MUTED, linewidth=0.5)
    ax.set_yticks(range(len(scored)), [_label(each.predictor) for each in scored], fontsize=7.5)
    ax.set_ylim(len(scored) - 0.4, -0.6)
    ax.set_xlim(SAMPLE[0] - 0.01, 1.03)
    ax.set_xticks(np.linspace(0, 1, 6))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("AUC")


def _interval(ax: Axes, found: Estimate, row: int, predictor: Predictor) -> None:
    color = _color(predictor)
    if found.has_interval:
        ax.plot([found.low, found.high], [row, row], color=color, linewidth=1.6, zorder=2)
    if not np.isnan(found.value):
        dots(ax, found.value, row, "o", color, 5.5, zorder=5, clip_on=False)


def rank_figure(curves: Frame, scored: Mapping[str, Sequence[Scored]]) -> Figure | None:
    """Draw a row for each ranked target: α_max's own prediction and the best baseline's; None without any."""
    known = {target: _pair(each) for target, each in scored.items() if each and _pair(each)}
    if not known:
        return None
    columns = max(map(len, known.values()))
    figure = Figure(figsize=(WIDTH_INCHES * (0.25 + 0.375 * columns), 0.4 + 2.5 * len(known)), layout="constrained")
    grid = figure.subplots(len(known), columns, squeeze=False)
    styles = mechanism_looks(curves["mechanism"])
    for axes, (target, pair) in zip(grid, known.items(), strict=True):
        for ax, each in zip(axes, pair, strict=False):
            _draw_ranks(ax, curves, each, target, styles)
        for ax in axes[len(pair) :]:
            ax.remove()
    handles = [mark_entry(name, marker, 4.5, color=color) for name, (color, marker) in styles.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns(handles))
    return figure


def _pair(scored: Sequence[Scored]) -> list[Scored]:
    """Return the crossing of α_max with the rate, and the best baseline; [] without a crossing."""
    own = [
        each for each in scored if each.predictor.column == "alpha_cross" and not np.isnan(each.scopes[POOLED].value)
    ]
    best = best_baseline(scored)
    return own + ([best] if best else []) if own else []


def _draw_ranks(ax: Axes, curves: Frame, each: Scored, target: str, styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw the curves' ranks within their strata, equal ones slightly apart."""
    frame = select_ranked(curves, target)
    known = frame[frame[each.predictor.column].notna()]
    x = shares_below(each.predictor.sign * known[each.predictor.column], list(known["stratum"]))
    y = shares_below(known[target], list(known["stratum"]))
    ax.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
    number = known.assign(x=x.round(9), y=y.round(9)).groupby(["x", "y"]).cumcount().to_numpy()
    # equal points on a spiral: on a line they would look like a trend
    aside_x, aside_y = (0.012 * np.sqrt(number) * turn(GOLDEN_ANGLE * number) for turn in (np.cos, np.sin))
    for name, (color, marker) in styles.items():
        own = (known["mechanism"] == name).to_numpy()
        place, look = (x[own] + aside_x[own], y[own] + aside_y[own]), {"alpha": 0.85, "markeredgewidth": 0.4}
        dots(ax, *place, marker, color, 5, zorder=3, **look)
    found = each.scopes[POOLED]
    within = f" ({found.low:.2f} to {found.high:.2f})" if found.has_interval else ""
    ax.set_title(f"ρ = {found.value:.2f}{within}, n = {len(known)}".replace("-", "−"), loc="left", fontsize=8.5)
    ax.set_xlabel(f"rank by: {_label(each.predictor)}")
    ax.set_ylabel(f"rank of {TARGETS[target]}")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
