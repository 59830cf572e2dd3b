"""Show the second validation number of classifiers: accuracy against learning rate, as a table and a figure; nothing
where no run has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.drawing.legends import mechanism_legend
from analysis.drawing.style import WIDTH_INCHES, looks, lr_axis
from analysis.drawing.tables import chunks, ended_badly, source
from analysis.drawing.typeset import Cell, Table, heading
from analysis.numbers.spread import INTERVAL_RULES, SHARE, Spread
from analysis.sections.nll import NLL_COLUMNS
from analysis.sections.section import Drawn, Figures, Section, is_of_rates, pictures, sourced, typst
from analysis.study.load import FINISHED, Frame, Study
from analysis.words import lr_text

NAME = "accuracy"
COLUMN = "val_accuracy"
CAPTION = (
    "Share of the held-out images whose class is told right, at the end of training, against learning rate. Points: "
    "seeds; line: the median of those that finished. The stable windows are judged on the cross entropy, not on "
    "this."
)


def finished(runs: Frame) -> Frame:
    """Return the runs that ended with an accuracy."""
    return runs[runs["status"].isin(FINISHED) & np.isfinite(runs[COLUMN])]


def accuracy_tables(study: Study) -> list[Table]:
    """Return tables, learning rate × mechanism, of median accuracy in per cent, its interval and n."""
    return [_table(study, series) for series in chunks(study.series, NLL_COLUMNS)] if len(finished(study.runs)) else []


def _table(study: Study, series: tuple[str, ...]) -> Table:
    lrs = sorted(set(study.runs.loc[study.runs["series"].isin(series), "lr"]))
    medians = {name: finished(study.of(name)).groupby("lr")[COLUMN].median() for name in series}
    best = {name: line.idxmax() for name, line in medians.items() if len(line)}
    rows = [(Cell(lr_text(lr)), *(_cell(study.of(name), lr, best.get(name) == lr) for name in series)) for lr in lrs]
    caption = (
        "Per cent of the held-out images whose class is told right, at the end of training; median over the seeds "
        f"that finished. {INTERVAL_RULES[SHARE]}; below it the runs that ended badly. Bold: the best learning rate "
        f"of each column. {source(study)}"
    )
    return Table("Accuracy against learning rate", caption, ("LR", *series), tuple(rows))


def _cell(runs: Frame, lr: float, bold: bool) -> Cell:
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    spread, troubles = Spread.of(finished(runs)[COLUMN], SHARE), ended_badly(runs)
    if spread.n == 0:
        return Cell(troubles[0] if troubles else "--", "\n".join(troubles[1:]))
    return Cell(_percent(spread.median), "\n".join([spread.detail(_percent), *troubles]), bold)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def figures(study: Study) -> Figures:
    """Draw the figure, where runs ended with an accuracy at several learning rates."""
    runs = finished(study.runs)
    return {NAME: sourced(study, _figure(study, runs), CAPTION)} if runs["lr"].nunique() > 1 else {}


def _figure(study: Study, runs: Frame) -> Figure:
    """Draw accuracy against learning rate: a line of medians for each series, and a point for each run."""
    styles = looks(study)
    figure = Figure(figsize=(WIDTH_INCHES, 2.4), layout="constrained")
    ax = figure.subplots()
    for name, style in styles.items():
        own = runs[runs["series"] == name]
        line = own.groupby("lr")[COLUMN].median().sort_index()
        ax.plot(line.index, line, color=style.color, linestyle=style.dashes, zorder=3)
        ax.plot(
            own["lr"],
            own[COLUMN],
            style.marker,
            color=style.color,
            markersize=4.2,
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=4,
        )
    lr_axis(ax, study.runs["lr"])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("learning rate")
    ax.set_ylabel("validation accuracy")
    mechanism_legend(figure, styles)
    return figure


def applies(study: Study) -> bool:
    return is_of_rates(study) and len(finished(study.runs)) > 0


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    return accuracy_tables(study)


def body(study: Study, drawn: Drawn) -> str:
    return heading("Accuracy") + pictures(drawn) + typst(accuracy_tables(study))


SECTION = Section(body, applies, figures, tables)
