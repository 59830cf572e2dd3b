"""Draw learning curves as in the consensus paper's Figures 7 to 9: by mechanism with an early and a late panel, and by
learning rate across mechanisms.

A line is the median over the seeds of one learning rate, its shade their range. A diverged seed counts as ∞ from where
it ended, as in the windows: the line stops where half of the seeds are gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.legends import legend_columns, mechanism_legend
from analysis.drawing.pieces import Pieces, heading, paragraph
from analysis.drawing.style import MUTED, WIDTH_INCHES, Look, looks, lr_colors
from analysis.drawing.tables import chunks
from analysis.sections.nll_figures import CROSS
from analysis.sections.section import CONTINUED, Drawn, Figures, Section, numbered, pictures, sourced
from analysis.study.load import Column, Frame, Study
from analysis.words import lr_text

EARLY_SHARE = 5  # the early panel holds the first fifth of the steps
SERIES_PER_FIGURE, RATES_PER_ROW = 5, 3
POINTS = 400  # drawn of a line
CAPTION = (
    "Training loss against step by mechanism, as in the consensus paper's Figure 7, early (left, averaged over a "
    "hundredth of the run) and late (right, over a twentieth), each on a scale of its own. Line: median over the "
    "seeds of a learning rate, ending where half of them have diverged; shade: their range; circles: validation "
    "NLL; ×: the last loss of a run that diverged. What rises above the axis is cut."
)
BY_RATE_CAPTION = (
    "The same by learning rate, the mechanisms beside each other, as the consensus paper's Figures 8 and 9; "
    "averaged over a twentieth of the run, scaled to what comes after its first fifth."
)
NAME, BY_RATE = "curves", "curves-by-lr"
Limits = tuple[float, float]


def figures(study: Study) -> Figures:
    """Draw ``curves`` (and ``curves-1``, … where there are many series) and ``curves-by-lr``; none without a recorded
    loss."""
    rows, ended = study.with_run(study.curves), study.runs.set_index("run_id")["status"]
    rows = rows[np.isfinite(rows["step"])].assign(diverged=rows["run_id"].map(ended) == "diverged")
    names = [name for name in study.series if np.isfinite(rows.loc[rows["series"] == name, "loss"]).any()]
    if not names:
        return {}
    parts = [_by_mechanism(study, rows, part) for part in chunks(names, SERIES_PER_FIGURE)]
    drawn = {numbered(NAME, i): sourced(study, each, CONTINUED if i else CAPTION) for i, each in enumerate(parts)}
    if len(names) > 1 and rows["run_lr"].nunique() > 1:
        drawn[BY_RATE] = sourced(study, _by_rate(study, rows, names), BY_RATE_CAPTION)
    return drawn


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading("Learning curves") + (pictures(drawn) or paragraph("No training loss was recorded."))


def smoothed(loss: Column, width: int | None = None) -> Column:
    """Return the centred running mean over ``width`` steps (a twentieth of the run); non-finite losses are left out,
    not averaged in."""
    finite = loss.where(np.isfinite(loss))
    return finite.rolling(width or max(1, len(loss) // 20), center=True, min_periods=1).mean().where(finite.notna())


def median_curve(runs: Frame, width: int) -> Frame:
    """Return the columns median, low, high by step, of the smoothed losses of runs that differ in their seed; median
    NaN where half of them or more have diverged."""
    curves, ended = {}, {}
    for run_id, run in runs[np.isfinite(runs["loss"])].groupby("run_id"):
        curves[run_id], ended[run_id] = (
            smoothed(run.set_index("step")["loss"].sort_index(), width),
            bool(run["diverged"].iloc[0]),
        )
    table = pd.DataFrame(curves).sort_index()
    counted = table.copy()
    for run_id in table:
        if ended[run_id]:
            counted.loc[counted.index > table[run_id].last_valid_index(), run_id] = math.inf
    middle = (
        pd.Series(np.nanmedian(counted.to_numpy(dtype=float), axis=1), index=table.index)
        if len(table)
        else pd.Series(dtype=float)
    )
    return pd.DataFrame(
        {"median": middle.where(np.isfinite(middle)), "low": table.min(axis=1), "high": table.max(axis=1)}
    )


def _by_mechanism(study: Study, rows: Frame, names: Iterable[str]) -> Figure:
    """Draw a row for each series with an early and a late panel, a line for each learning rate."""
    names, colors, last = list(names), lr_colors(study.runs["lr"]), int(rows["step"].max())
    split = max(1, last // EARLY_SHARE)
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + 1.3 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 2, sharex="col", sharey="col", squeeze=False)
    spans = ((0, split, max(1, last // 100)), (split, last, max(1, last // 20)))
    for column, (start, stop, width) in enumerate(spans):
        lines = {(name, lr): median_curve(runs, width) for (name, lr), runs in rows.groupby(["series", "run_lr"])}
        within = [line[(line.index >= start) & (line.index <= stop)] for line in lines.values()]
        limits = _limits(within, rows[(rows["step"] >= start) & (rows["step"] <= stop)]["val_nll"], early=not start)
        for ax, name in zip(axes[:, column], names, strict=True):
            for (series, lr), runs in rows.groupby(["series", "run_lr"]):
                if series == name:
                    _draw(ax, lines[name, lr], runs, colors[lr], (start, stop), limits)
            ax.set_xlim(start, stop)
            ax.set_ylim(*limits)
    for ax, name in zip(axes[:, 0], names, strict=True):
        ax.set_title(name, loc="left", fontweight="bold")
        ax.set_ylabel("loss (nats)")
    for ax, label in zip(axes[-1], (f"step, the first {split}", f"step, from {split} on"), strict=True):
        ax.set_xlabel(label)
    _rate_legend(figure, colors, rows)
    return figure


def _by_rate(study: Study, rows: Frame, names: list[str]) -> Figure:
    """Draw a panel for each learning rate, a line for each series."""
    styles, lrs, last = looks(study), sorted(rows["run_lr"].unique()), int(rows["step"].max())
    lines = -(-len(lrs) // RATES_PER_ROW)
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + 1.6 * lines), layout="constrained")
    axes = figure.subplots(lines, min(RATES_PER_ROW, len(lrs)), sharex=True, sharey=True, squeeze=False).ravel()
    curves = {
        (name, lr): median_curve(runs, max(1, last // 20)) for (name, lr), runs in rows.groupby(["series", "run_lr"])
    }
    limits = _limits(
        [line[line.index >= last // EARLY_SHARE] for line in curves.values()], rows["val_nll"], early=False
    )
    for index, lr in enumerate(lrs):
        for name in names:
            runs = rows[(rows["series"] == name) & (rows["run_lr"] == lr)]
            if (name, lr) in curves:
                _draw(axes[index], curves[name, lr], runs, styles[name].color, (0, last), limits, styles[name])
        axes[index].set_title(f"LR {lr_text(lr)}", loc="left", fontweight="bold")
        axes[index].set_ylim(*limits)
        axes[index].set_xlim(0, last)
        if index + RATES_PER_ROW >= len(lrs):
            axes[index].set_xlabel("step")
            axes[index].tick_params(labelbottom=True)
        if index % RATES_PER_ROW == 0:
            axes[index].set_ylabel("loss (nats)")
    for ax in axes[len(lrs) :]:
        ax.remove()
    mechanism_legend(figure, {name: styles[name] for name in names}, _marks(rows), markers=False)
    return figure


def _limits(lines: list[Frame], validation: Column, *, early: bool) -> Limits:
    """Return limits with room for the median lines: early up to where they start, late up to where nine tenths of their
    points lie; what blows up is cut."""
    known = [line["median"].dropna() for line in lines]
    known = [line for line in known if len(line)]
    if not known:
        return 0.0, 1.0
    values = np.concatenate(known)
    high = float(np.median([line.iloc[0] for line in known])) if early else float(np.percentile(values, 90))
    finite = validation[np.isfinite(validation)]
    low = min(float(values.min()), float(finite.min()) if len(finite) else math.inf)
    room = max(high - low, 0.01 * abs(low), 1e-3)
    return low - 0.06 * room, high + 0.1 * room


def _draw(
    ax: Axes, line: Frame, runs: Frame, color, span: tuple[int, int], limits: Limits, look: Look | None = None
) -> None:
    """Draw one line with its shade; circles: the median of the validation NLLs of a step; a cross: the end of each
    diverged run within the span."""
    shown = line[(line.index >= span[0]) & (line.index <= span[1])]
    thin = shown.iloc[:: max(1, len(shown) // POINTS)]
    ax.plot(thin.index, thin["median"], color=color, linewidth=0.95, linestyle=look.dashes if look else "-", zorder=3)
    ax.fill_between(thin.index, thin["low"], thin["high"], color=color, alpha=0.16, linewidth=0, zorder=2)
    checked = (
        runs[np.isfinite(runs["val_nll"]) & (runs["step"] >= span[0]) & (runs["step"] <= span[1])]
        .groupby("step")["val_nll"]
        .median()
    )
    ax.plot(
        checked.index, checked, "o", color=color, markerfacecolor="white", markersize=2.8, markeredgewidth=0.8, zorder=4
    )
    for _, run in runs[runs["diverged"] & np.isfinite(runs["loss"])].groupby("run_id"):
        last = run.loc[run["step"].idxmax()]
        if span[0] <= last["step"] <= span[1]:
            ax.plot(last["step"], min(max(float(last["loss"]), limits[0]), limits[1]), color=color, zorder=5, **CROSS)


def _marks(rows: Frame) -> list[Line2D]:
    """Return the legend's entries for validation and divergence, each where the rows have it."""
    marks = []
    if rows["val_nll"].notna().any():
        marks.append(
            Line2D(
                [],
                [],
                color=MUTED,
                marker="o",
                markerfacecolor="white",
                markersize=4,
                linestyle="none",
                label="validation",
            )
        )
    if rows["diverged"].any():
        marks.append(Line2D([], [], color=MUTED, label="diverged", **CROSS))
    return marks


def _rate_legend(figure: Figure, colors: dict, rows: Frame) -> None:
    handles = [
        *(Line2D([], [], color=color, linewidth=1.8, label=lr_text(lr)) for lr, color in colors.items()),
        *_marks(rows),
    ]
    place = {"loc": "outside upper center", "ncols": legend_columns(handles), "handlelength": 1.4, "columnspacing": 1.3}
    figure.legend(handles=handles, title="learning rate", title_fontsize=8.5, **place)


SECTION = Section(body, figures=figures)
