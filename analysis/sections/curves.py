"""Draw learning curves as in the consensus paper's Figures 7 to 9.

By mechanism with an early and a late panel, and by learning rate across mechanisms. A line is the median over the seeds
of one learning rate, its shade their range. A diverged seed counts as ∞ from its end on, as in the windows: the line
stops when half of the seeds have diverged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.marks import (
    choose_panels,
    entry,
    legend_columns,
    mark_entry,
    mechanism_legend,
    rate_entries,
    rate_legend,
    rate_title,
)
from analysis.drawing.pieces import Pieces, heading, paragraph
from analysis.drawing.style import WIDTH_INCHES, Look, looks, lr_colors, panel_grid, panels_width
from analysis.drawing.tables import chunks
from analysis.sections.nll_figures import CROSS
from analysis.sections.section import CONTINUED, Captioned, Drawn, Figures, Section, continuation_name, pictures
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.study.reference import compares_losses
from analysis.words import lr_text, wrap

Key = tuple[str, float]  # series and rate
Losses = TypeVar("Losses", Column, Frame)


def smooth(loss: Losses, width: int | None = None) -> Losses:
    """Return the centred running mean of each column over ``width`` steps (default: a twentieth of the run).

    Non-finite losses are left out, not averaged in.
    """
    finite = loss.where(np.isfinite(loss))
    return finite.rolling(width or max(1, len(loss) // 20), center=True, min_periods=1).mean().where(finite.notna())


def median_curves(rows: Frame, width: int) -> dict[Key, Frame]:
    """Return smoothed losses by series and rate: columns median, low, high over seeds, by step.

    The median is NaN once half of the seeds or more have diverged. Curves without a finite loss are empty. ``rows`` has
    a row for each step, with ``run_id series run_lr step loss diverged``; ``width`` is in steps.
    """
    finite = rows[np.isfinite(rows["loss"])].sort_values(["run_id", "step"], kind="stable")
    keys = list(rows.groupby(["series", "run_lr"]).indices)
    if finite.empty:
        return dict.fromkeys(keys, pd.DataFrame(columns=["median", "low", "high"], dtype=float))
    # all runs at once: each column has a run's finite losses without gaps
    place = finite.groupby("run_id").cumcount()
    table = finite.assign(place=place).pivot(index="place", columns="run_id", values="loss")
    means = smooth(table, width).to_numpy()[place, table.columns.get_indexer(finite["run_id"])]
    lines = finite.assign(loss=means).pivot(index="step", columns="run_id", values="loss")
    runs = finite.groupby("run_id")[["series", "run_lr", "diverged", "step"]].last().loc[lines.columns]
    is_over = np.greater.outer(lines.index.to_numpy(), runs["step"].to_numpy()) & runs["diverged"].to_numpy(dtype=bool)
    own = [runs["series"], runs["run_lr"]]
    middle = lines.mask(is_over, math.inf).T.groupby(own).median().T
    low, high = lines.T.groupby(own).min().T, lines.T.groupby(own).max().T
    found = {key: pd.DataFrame({"median": middle[key], "low": low[key], "high": high[key]}) for key in low}
    none = next(iter(found.values())).iloc[:0]
    return {key: _drop_unreached(found[key]) if key in found else none for key in keys}


def _drop_unreached(line: Frame) -> Frame:
    """Return the steps reached by a run; the median only if finite."""
    line = line[line["low"].notna()]
    return line.assign(median=line["median"].where(np.isfinite(line["median"])))


MANY_ROWS = 4  # of panels; these are lower, so that the figure by rate fits below
EARLY_SHARE = 5  # the early panel shows the first fifth of the steps
SERIES_PER_FIGURE, RATES_PER_ROW = 5, (3, 4)
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
    """Draw ``curves`` (``curves-1``, … for many series) and ``curves-by-lr``; none without a recorded loss."""
    rows, known = _read_logs(study)
    names = [name for name in study.series if name in known]
    if not names:
        return {}
    drawn, spans = _Curves.of(rows), _spans_by_series(study, rows, names)
    parts = [_draw_by_mechanism(study, drawn, part, spans) for part in chunks(names, SERIES_PER_FIGURE)]
    found = {continuation_name(NAME, i): Captioned(each, CONTINUED if i else CAPTION) for i, each in enumerate(parts)}
    if len(names) > 1 and rows["run_lr"].nunique() > 1 and not compares_losses(study):
        found[BY_RATE] = Captioned(_draw_by_rate(study, drawn, names, spans[names[0]][-1]), BY_RATE_CAPTION)
    return found


def _read_logs(study: Study) -> tuple[Frame, set[str]]:
    """Return the logged steps with ``diverged``, and the series with a recorded loss."""
    logged = study.curves[["run_id", "step", "loss", "val_nll"]]  # of 20,000 runs, millions of rows
    rows = study.with_run(logged)[[*logged, "series", "run_lr"]]
    ended = study.runs.set_index("run_id")["status"]
    rows = rows[np.isfinite(rows["step"])].assign(diverged=rows["run_id"].map(ended) == "diverged")
    return rows, set(rows.loc[np.isfinite(rows["loss"]), "series"])


def row_figure(study: Study, first: Sequence[str] = ()) -> tuple[Figure, int] | None:
    """Draw one row of at most four panels, one per series, a line per rate.

    Args:
        study: the study.
        first: series to draw before all others.

    Returns:
        The figure and the number of series with a recorded loss; None without any.
    """
    rows, known = _read_logs(study)
    names = choose_panels(study, first, known)
    if not names:
        return None
    drawn, spans, colors = _Curves.of(rows), _spans_by_series(study, rows, names), lr_colors(study.runs["lr"])
    figure = Figure(figsize=(panels_width(len(names)), 2.3), layout="constrained")
    axes = figure.subplots(1, len(names), sharey=not compares_losses(study), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        *_, whole = spans[name]
        for series, lr in whole.curves:
            if series == name:
                _draw(ax, drawn, (name, lr), colors[lr], whole)
        ax.set_xlim(whole.start, whole.stop)
        ax.set_ylim(*whole.limits)
        ax.set_title(wrap(name, 22), loc="left", fontweight="bold")
        ax.set_xlabel("step")
    axes[0].set_ylabel(f"loss{wording.nats(study)}")
    rate_legend(figure, colors, _marks(drawn.rows))
    return figure, len(known)


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading("Learning curves") + (pictures(drawn) or paragraph("No training loss was recorded."))


@dataclass(frozen=True)
class _Curves:
    """The curves of each series and rate.

    ``rows``: all logged steps; ``validated``: median validation NLL by step; ``ends``: last finite loss of each
    diverged run.
    """

    rows: Frame
    validated: dict[Key, Column]
    ends: dict[Key, Frame]

    @classmethod
    def of(cls, rows: Frame) -> _Curves:
        validated = rows[np.isfinite(rows["val_nll"])].groupby(["series", "run_lr", "step"])["val_nll"].median()
        lost = rows[rows["diverged"] & np.isfinite(rows["loss"])]
        ends = lost.loc[lost.groupby("run_id")["step"].idxmax()]
        return cls(
            rows,
            {key: each.droplevel([0, 1]) for key, each in validated.groupby(level=[0, 1])},
            dict(iter(ends.groupby(["series", "run_lr"]))),
        )


@dataclass(frozen=True)
class _Span:
    """The curves between two steps, with the limits shared by all panels."""

    start: int
    stop: int
    curves: dict[Key, Frame]
    limits: Limits


Spans = tuple[_Span, _Span, _Span]


def _spans_by_series(study: Study, rows: Frame, names: Sequence[str]) -> Mapping[str, Spans]:
    """Return the spans of all series together for each; its own if losses have different units."""
    if compares_losses(study):
        return {name: _spans(rows[rows["series"] == name]) for name in names}
    return dict.fromkeys(names, _spans_of_all(study))


@once_per_study
def _spans_of_all(study: Study) -> Spans:
    """Return the spans of all series together, for the second page and the appendix alike."""
    return _spans(_read_logs(study)[0])


def _spans(rows: Frame) -> Spans:
    """Return the early part, the late part, and the whole on the late scale."""
    last = int(rows["step"].max())
    split = max(1, last // EARLY_SHARE)
    early, late = (median_curves(rows, max(1, last // share)) for share in (100, 20))
    return (
        _Span(0, split, early, _limits(early, (0, split), _validation(rows, 0, split), early=True)),
        _Span(split, last, late, _limits(late, (split, last), _validation(rows, split, last), early=False)),
        _Span(0, last, late, _limits(late, (last // EARLY_SHARE, last), rows["val_nll"], early=False)),
    )


def _validation(rows: Frame, start: int, stop: int) -> Column:
    return rows.loc[(rows["step"] >= start) & (rows["step"] <= stop), "val_nll"]


def _draw_by_mechanism(study: Study, drawn: _Curves, names: Sequence[str], spans: Mapping[str, Spans]) -> Figure:
    """Draw an early and a late panel for each series, one line per rate."""
    colors = lr_colors(study.runs["lr"])
    row = 1.3 if len(names) < MANY_ROWS else 1.05  # inches
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + row * len(names)), layout="constrained")
    share = "none" if compares_losses(study) else "col"
    axes = figure.subplots(len(names), 2, sharex="col", sharey=share, squeeze=False)
    for panels, name in zip(axes, names, strict=True):
        for ax, span in zip(panels, spans[name][:2], strict=True):
            for series, lr in span.curves:
                if series == name:
                    _draw(ax, drawn, (name, lr), colors[lr], span)
            ax.set_xlim(span.start, span.stop)
            ax.set_ylim(*span.limits)
    for ax, name in zip(axes[:, 0], names, strict=True):
        ax.set_title(name, loc="left", fontweight="bold")
        ax.set_ylabel(f"loss{wording.nats(study)}")
    split = spans[names[0]][0].stop
    for ax, label in zip(axes[-1], (f"step, the first {split}", f"step, from {split} on"), strict=True):
        ax.set_xlabel(label)
    handles = [*rate_entries(figure, colors), *_marks(drawn.rows)]
    place = {"loc": "outside upper center", "ncols": legend_columns(handles), "handlelength": 1.4, "columnspacing": 1.3}
    figure.legend(handles=handles, title=rate_title(colors), title_fontsize=8.5, **place)
    return figure


def _draw_by_rate(study: Study, drawn: _Curves, names: list[str], span: _Span) -> Figure:
    """Draw a panel for each learning rate, a line for each series."""
    styles, lrs = looks(study), sorted(drawn.rows["run_lr"].unique())
    columns = min(min(RATES_PER_ROW, key=lambda row: math.ceil(len(lrs) / row)), len(lrs))
    figure, axes = panel_grid(len(lrs), columns, 1.6, 0.75, sharex=True, sharey=True)
    for index, lr in enumerate(lrs):
        for name in names:
            if (name, lr) in span.curves:
                _draw(axes[index], drawn, (name, lr), styles[name].color, span, styles[name])
        axes[index].set_title(f"LR {lr_text(lr)}", loc="left", fontweight="bold")
        axes[index].set_ylim(*span.limits)
        axes[index].set_xlim(span.start, span.stop)
        if index + columns >= len(lrs):
            axes[index].set_xlabel("step")
            axes[index].tick_params(labelbottom=True)
        if index % columns == 0:
            axes[index].set_ylabel(f"loss{wording.nats(study)}")
    mechanism_legend(figure, {name: styles[name] for name in names}, _marks(drawn.rows), markers=False)
    return figure


def _limits(curves: dict[Key, Frame], span: tuple[int, int], validation: Column, *, early: bool) -> Limits:
    """Return limits around the median lines within the span; blow-ups are cut.

    Upper end: the lines' start if early, else their 90th percentile, but not above the start.
    """
    known = [_cut(line, *span)["median"].dropna() for line in curves.values()]
    known = [line for line in known if len(line)]
    if not known:
        return 0.0, 1.0
    values = np.concatenate(known)
    starts = [each.iloc[0] for line in curves.values() if len(each := line["median"].dropna())]
    high = float(np.median(starts))
    high = high if early else min(high, float(np.percentile(values, 90)))
    finite = validation[np.isfinite(validation)]
    low = min(float(values.min()), float(finite.min()) if len(finite) else math.inf)
    room = max(high - low, 0.01 * abs(low), 1e-3)
    return low - 0.06 * room, high + 0.1 * room


def _cut(of_steps: Frame, start: int, stop: int) -> Frame:
    return of_steps[(of_steps.index >= start) & (of_steps.index <= stop)]


def _draw(ax: Axes, drawn: _Curves, key: Key, color, span: _Span, look: Look | None = None) -> None:
    """Draw one line with its shade; within the span, validation medians and diverged ends.

    Circles are validation medians, crosses the ends.
    """
    shown = _cut(span.curves[key], span.start, span.stop)
    thin = shown.iloc[:: max(1, len(shown) // POINTS)]
    ax.plot(thin.index, thin["median"], color=color, linewidth=0.95, linestyle=look.dashes if look else "-", zorder=3)
    ax.fill_between(thin.index, thin["low"], thin["high"], color=color, alpha=0.16, linewidth=0, zorder=2)
    checked = _cut(drawn.validated.get(key, pd.Series(dtype=float)), span.start, span.stop)
    ax.plot(
        checked.index, checked, "o", color=color, markerfacecolor="white", markersize=2.8, markeredgewidth=0.8, zorder=4
    )
    if key in drawn.ends:
        ends = drawn.ends[key]
        ends = ends[ends["step"].between(span.start, span.stop)]
        if len(ends):  # all in one, since there may be hundreds
            ax.plot(ends["step"], ends["loss"].clip(*span.limits), color=color, zorder=5, **CROSS)


def _marks(rows: Frame) -> list[Line2D]:
    """Return the legend's entries for validation and divergence, each if present in the rows."""
    marks = []
    if rows["val_nll"].notna().any():
        marks.append(mark_entry("validation", "o", markerfacecolor="white"))
    if rows["diverged"].any():
        marks.append(entry("diverged", **CROSS))
    return marks


SECTION = Section(body, figures=figures, brief=lambda study, drawn: ())  # the second page has them
