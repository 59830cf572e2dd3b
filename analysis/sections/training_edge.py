"""Show how near each run trains to the edge of stability: α / α_max and Adam's sharpness against step, by rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.marks import rate_legend, symbols
from analysis.drawing.pieces import Pieces
from analysis.drawing.style import MUTED, WIDTH_INCHES, lr_colors
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.windows import windows
from analysis.sections.section import (
    CONTINUED,
    Captioned,
    Drawn,
    Figures,
    Section,
    continuation_name,
    is_of_rates,
    list_one,
    make_body,
    make_printer,
)
from analysis.study.load import Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import lr_text, plural, power, significant, wrap

TITLE, NAME, LOG = "How near the edge of stability a run trains", "training-edge", "edge"
RATIOS = {"of_step": "α / α_max", "of_adam": "Adam’s sharpness over its threshold"}
ROWS = 4
LATE_SHARE = 0.5  # of a run's steps: a ratio's value is its median over the later ones
CAPTION = (
    "Left: α over α_max, the largest rate that the loss’s curvature allows along the step taken, on that step’s batch; "
    "0 (not drawn) where the curvature is not positive. Right: the largest eigenvalue of Adam’s preconditioned Hessian "
    "over its threshold (2 + 2β₁)/((1 − β₁)α) (Cohen et al. 2022). Beyond 1 (dashed) a quadratic model of the loss "
    "grows. One line a learning rate, median over seeds. The threshold was found with whole batches. The eigenvalue is "
    "a lower bound, from at most five products that start at the last measurement's vector: of nine at batches of 8 "
    "sequences, four were 20 to 45 % below Lanczos' value."
)


def applies(study: Study) -> bool:
    return is_of_rates(study) and len(study.signals.get(LOG, ())) > 0


@once_per_study
def read_ratios(study: Study) -> Frame:
    """Return each logged step's ``of_step`` and ``of_adam`` with its run's ``series``, ``run_lr`` and ``seed``.

    ``of_step`` is 0 where the curvature is not positive: no rate is too large there.
    """
    rows = study.with_run(study.signals[LOG])
    of_step = (rows["alpha"] / rows["alpha_max"]).mask(rows["curvature"] <= 0, 0.0)
    return rows.assign(of_step=of_step, of_adam=rows["adam_ratio"])


def find_late(study: Study, ratio: str) -> Column:
    """Return a ratio's median over the later half of a run's steps, median over seeds, by series and rate.

    A run without such a step, because it diverged before, counts as ∞. Series without the ratio are left out.
    """
    rows = read_ratios(study)
    rows = rows[rows[ratio].notna()]
    late = rows[rows["step"] >= LATE_SHARE * study.runs["num_steps"].max()].groupby("run_id")[ratio].median()
    runs = study.runs[study.runs["series"].isin(set(rows["series"])) & study.runs["run_id"].isin(set(rows["run_id"]))]
    values = runs["run_id"].map(late).where(lambda each: each.notna(), math.inf)
    return values.groupby([runs["series"], runs["lr"]]).median()


def table(study: Study) -> Table:
    """Return one row per series: the upper edge of its window, and the lowest rate beyond 1 by each ratio."""
    late = {name: find_late(study, name) for name in RATIOS}
    late = {name: values for name, values in late.items() if len(values)}
    rows = [
        (Cell(series), upper_edge(study, series), *(_first_beyond(values, series) for values in late.values()))
        for series in study.series
    ]
    caption = (
        "Upper edge: of the stable window. Then the lowest learning rate at which a ratio is above 1, as median over "
        "the later half of the steps and over seeds, and the ratio there; none: at no rate, and the largest rate's."
    )
    return Table(TITLE, caption, ("mechanism", "upper edge", *(f"{RATIOS[name]} > 1" for name in late)), tuple(rows))


def sentences(study: Study) -> list[str]:
    """Return for each ratio how often it first exceeds 1 at the first swept rate beyond the stable window."""
    found = []
    for name, text in RATIOS.items():
        late, places = find_late(study, name), []
        for series in dict.fromkeys(late.index.get_level_values("series")):
            own, window = late[series].sort_index(), windows(study)[series].median
            if window is None or window.is_empty or window.open_high:
                continue
            outside = [lr for lr in own.index if lr > window.high.lr]
            beyond = own.index[own > 1]
            places.append(len(beyond) > 0 and len(outside) > 0 and beyond[0] == outside[0])
        if places:
            have = "has" if len(places) == 1 else "have"
            found.append(
                f"{sum(places)} of {plural(len(places), 'curve')} with a window {have} {text} above 1 first at the "
                "first swept rate beyond it."
            )
    return found


def upper_edge(study: Study, series: str) -> Cell:
    """Return a cell with the upper edge of a series' stable window."""
    window = windows(study)[series].median
    if window is None or window.is_empty:
        return Cell("--")
    return Cell(f"{'≥ ' * window.open_high}{power(window.high.lr)}")


def _first_beyond(values: Column, series: str) -> Cell:
    own = values[values.index.get_level_values("series") == series].droplevel("series").sort_index()
    beyond = own[own > 1]
    if len(own) == 0:
        return Cell("--")
    lr, value = (beyond.index[0], beyond.iloc[0]) if len(beyond) else (own.index[-1], own.iloc[-1])
    return Cell(lr_text(float(lr)) if len(beyond) else "none", "diverged" if math.isinf(value) else significant(value))


def figures(study: Study) -> Figures:
    """Draw ``training-edge`` (``training-edge-1``, … for many series), a row for each series."""
    rows = read_ratios(study)
    shown = [name for name in RATIOS if rows[name].notna().any()]
    names = [series for series in study.series if (rows["series"] == series).any()]
    drawn = [_draw(rows, part, shown) for part in chunks(names, ROWS)]
    return {continuation_name(NAME, i): Captioned(each, CONTINUED if i else CAPTION) for i, each in enumerate(drawn)}


def _draw(rows: Frame, names: Sequence[str], shown: Sequence[str]) -> Figure:
    colors = lr_colors(sorted(rows["run_lr"].unique()))
    figure = Figure(figsize=(WIDTH_INCHES, 0.5 + 1.45 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(shown), squeeze=False, sharex=True, sharey="col")
    for line, series in zip(axes, names, strict=True):
        own = rows[rows["series"] == series]
        for ax, ratio in zip(line, shown, strict=True):
            _draw_ratio(ax, own, ratio, colors)
            ax.set_ylabel(symbols(wrap(RATIOS[ratio], 20)), fontsize=7.5)
        line[0].set_title(series, loc="left", fontsize=8.5)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    rate_legend(figure, colors)
    return figure


def _draw_ratio(ax: Axes, rows: Frame, ratio: str, colors) -> None:
    medians = rows.groupby(["run_lr", "step"])[ratio].median()
    for lr in sorted(rows["run_lr"].unique()):
        line = medians[lr]
        line = line[np.isfinite(line) & (line > 0)]
        ax.plot(line.index, line.to_numpy(), color=colors[lr], linewidth=1.1, marker=".", markersize=3)
    ax.axhline(1, color=MUTED, linewidth=0.8, linestyle="--")
    ax.set_yscale("log")


TABLES = list_one(table)
BODY = make_body(TITLE, TABLES, sentences, is_table_first=True)


def brief(study: Study, drawn: Drawn) -> Pieces:
    return BODY(study, {name: drawn[name] for name in drawn if name == NAME})


SECTION = Section(BODY, applies, figures, make_printer(TABLES, sentences), brief)
