"""Declare quantities, and build their tables: over learning rates, or over places (series, learning rate, layer, …).

An `Outcome` is a number at a run's end: it states its column, names, unit and format. A `Measure` is a column of a
table of places: it states its heading, the number per seed and the format. A level is a median with the seeds' range, a
difference a mean with its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.drawing.tables import list_failures
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import MEDIAN_RULE, Mean, Spread
from analysis.numbers.step_shares import PHASES, phases_of
from analysis.numbers.windows import GENERATIVE, NLL_NAMES, VALIDATION, median_line, outcomes
from analysis.study import wording
from analysis.study.load import HAS_RESULT, Column, Frame, Study
from analysis.words import lr_text, power, significant
from stability.runs.words import EXPLODED, is_exploded

Form = Callable[[float], str]
three_digits: Form = "{:.3f}".format
four_digits: Form = "{:.4f}".format


def signed_nats(nats: float) -> str:
    return f"{round(nats, 4) + 0.0:+.4f}"  # +0.0000 instead of -0.0000


def percent(value: float) -> str:
    return "--" if np.isnan(value) else f"{100 * value:.4g} %"


def percent_digits(value: float) -> str:
    return f"{100 * value:.1f}"


def spread_cell(spread: Spread, form: Form = significant) -> Cell:
    """Return a cell with the median over seeds, interval and n; ``--`` if empty."""
    return Cell(form(spread.median), spread.detail(form)) if spread.n else Cell("--")


@dataclass(frozen=True)
class Measure:
    """A column with the median over seeds, their range and n.

    Attributes:
        label: heading.
        by_seed: one number per seed, from one place's rows.
        form: formats a number.
    """

    label: str
    by_seed: Callable[[Frame], Iterable[float]]
    form: Form = significant

    def cell(self, rows: Frame) -> Cell:
        """Return the cell for one place."""
        return spread_cell(Spread.of(self.by_seed(rows)), self.form)


@dataclass(frozen=True)
class Difference(Measure):
    """A column whose sign is asked for, with the mean over seeds, its interval and n."""

    form: Form = signed_nats

    def cell(self, rows: Frame) -> Cell:
        found = Mean.of(self.by_seed(rows))
        return Cell(self.form(found.mean), found.detail(self.form)) if found.n else Cell("--")


@dataclass(frozen=True)
class Text:
    """A column of words, or a number without an interval; ``write`` formats one place's rows."""

    label: str
    write: Callable[[Frame], str]

    def cell(self, rows: Frame) -> Cell:
        return Cell(self.write(rows))


@dataclass(frozen=True)
class Place:
    """A column that identifies a place: constant within its rows."""

    label: str
    column: str
    form: Callable[[Any], str] = str


SERIES, RATE, LAYER = (
    Place("mechanism", "series"),
    Place("LR", "run_lr", lr_text),
    Place("layer", "layer", "{:.0f}".format),
)


def over_rows(values: Callable[[Frame], Column], how: str = "median") -> Callable[[Frame], Column]:
    """Return a function for the median (or ``how``) of ``values`` over each seed's rows."""
    return lambda rows: values(rows).groupby(rows["seed"]).agg(how)


def grid_table(
    title: str,
    caption: str,
    rows: Frame,
    places: Sequence[Place],
    measures: Sequence[Measure | Text],
    groups: Sequence[tuple[str, int]] = (),
) -> Table:
    """Return a table with one row per place, series in the study's order.

    Args:
        title: as printed.
        caption: as printed.
        rows: with ``order`` (`Study.probed`), ``seed`` and the places' columns.
        places: identify the table's rows; first columns.
        measures: remaining columns.
        groups: headings over several columns, each with their number.
    """
    body = []
    for key, part in rows.groupby(["order", *(place.column for place in places)]):
        where = [Cell(place.form(value)) for place, value in zip(places, key[1:], strict=True)]
        body.append((*where, *(measure.cell(part) for measure in measures)))
    header = (*(place.label for place in places), *(measure.label for measure in measures))
    return Table(title, caption, header, tuple(body), tuple(groups))


def phase_tables(rows: Frame, make: Callable[[Frame, str], Iterable[Table]]) -> list[Table]:
    """Return the tables made by ``make`` from each phase's rows and name, terminal first.

    Tables without rows are left out.
    """
    named = ((phase, PHASES.get(phase, phase)) for phase in phases_of(rows))
    return [table for phase, name in named for table in make(rows[rows["phase"] == phase], name) if table.rows]


def rows_of_run(frame: Frame, name: str) -> Frame:
    """Return one run's rows in the form of a study with this series alone."""
    return frame.assign(series=name, run_lr=frame["lr"], seed=0, order=0)


NLL_TITLES = {column: f"{name[0].upper()}{name[1:]}" for column, name in NLL_NAMES.items()}
CELL_RULE = f"{MEDIAN_RULE}; below it the runs that ended badly."  # of `nll_cell`


@dataclass(frozen=True)
class Outcome:
    """A number at the end of a run, compared over learning rates: an NLL or a share.

    Attributes:
        column: of ``runs``.
        title: begins a table's title.
        axis: label of a figure's axis.
        unit: its unit.
        remark: explains a cell's words in a caption.
        form: formats a value.
        is_share: whether higher is better.
    """

    column: str
    title: str
    axis: str
    unit: str
    remark: str = ""
    form: Form = three_digits
    is_share: bool = False

    def best_rate(self, study: Study, series: str) -> float | None:
        """Return the rate of the best median over seeds, for a share over those that finished; None without any."""
        if not self.is_share:
            return best_rate(study, series, self.column)
        medians = finished_medians(study.of(series), self.column)
        return float(medians.idxmax()) if len(medians) else None


def outcome_of(study: Study, column: str = VALIDATION) -> Outcome:
    """Return the declaration of a study's validation NLL, generative NLL or share."""
    words, nats = wording.words(study), wording.nats(study)
    if words.share is not None and column == words.share.column:
        name, unit = words.share.name, f"per cent {words.share.of},"
        return Outcome(column, name.capitalize(), f"validation {name}", unit, form=percent_digits, is_share=True)
    if column == GENERATIVE:
        return Outcome(column, NLL_TITLES[column], f"{NLL_NAMES[column]}{nats}", words.generative_unit)
    remark = "Exploded: above the NLL at initialisation. "
    return Outcome(VALIDATION, NLL_TITLES[VALIDATION], f"{words.nll}{nats}", words.unit, remark)


def rate_table(study: Study, outcome: Outcome, series: Sequence[str], note: str = "") -> Table:
    """Return an outcome's median, interval, n and failures, learning rate × series.

    Args:
        study: the study.
        outcome: the quantity.
        series: the columns.
        note: ends the caption.
    """
    best = {name: outcome.best_rate(study, name) for name in series}
    lrs = sorted(set(study.runs.loc[study.runs["series"].isin(series), "lr"]))
    form = (outcome.column, outcome.form)
    rows = [
        (Cell(lr_text(lr)), *(nll_cell(study.of(name), lr, best[name] == lr, *form) for name in series)) for lr in lrs
    ]
    caption = (
        f"{outcome.unit[0].upper()}{outcome.unit[1:]} at the end of training; median over the seeds that finished. "
        f"{CELL_RULE} {outcome.remark}Bold: the best learning rate of each column.{note}"
    )
    return Table(f"{outcome.title} against learning rate", caption, ("LR", *series), tuple(rows))


def best_rate(study: Study, series: str, column: str = VALIDATION) -> float | None:
    """Return the rate of the lowest median NLL, a divergence counting as ∞.

    Args:
        study: the study.
        series: the series.
        column: the NLL's column.

    Returns:
        The rate; None if no median is finite.
    """
    line = median_line(outcomes(study, series, column))
    return float(line.idxmin()) if np.isfinite(line).any() else None


def select_finished(runs: Frame, column: str) -> Frame:
    """Return the finished runs with a finite ``column``."""
    return runs[runs["status"].isin(HAS_RESULT) & np.isfinite(runs[column])] if column in runs else runs.iloc[:0]


def finished_medians(runs: Frame, column: str) -> Column:
    """Return the median of ``column`` over the finished runs, by learning rate."""
    return select_finished(runs, column).groupby("lr")[column].median()


def cell_at(study: Study, series: str, lr: float, column: str = VALIDATION) -> Cell:
    """Return an NLL at one rate, a divergence counting as ∞: median over seeds, interval and n.

    Args:
        study: the study.
        series: the series.
        lr: the rate.
        column: the NLL's column.
    """
    spread, runs = Spread.of(outcomes(study, series, column).loc[lr]), study.of(series)
    return Cell(nll_text(spread.median, runs), nll_detail(spread, runs))


def nll_cell(runs: Frame, lr: float, bold: bool, column: str = VALIDATION, form: Form = three_digits) -> Cell:
    """Return a quantity at a learning rate: median over finished runs, interval, n; below it the failures.

    Args:
        runs: one series' runs.
        lr: the rate.
        bold: whether it is the best in its row or column.
        column: the quantity: an NLL, a part of one, or a share.
        form: formats the number.
    """
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    values, troubles = select_finished(runs, column)[column], list_failures(runs)
    spread = Spread.of(values)
    if column == VALIDATION:
        text, detail = nll_text(spread.median, runs), nll_detail(spread, runs)
    else:
        text, detail = form(spread.median), spread.detail(form)
    if spread.n == 0:
        return Cell(troubles[0] if troubles else "--", "\n".join(troubles[1:]))
    return Cell(text, "\n".join([detail, *troubles]), bold)


def _explodes(nll: float, runs: Frame) -> bool:
    """Return whether a finite NLL lies above that of the untrained model."""
    return is_exploded(nll, float(runs["init_nll"].max()))


def nll_text(nll: float, runs: Frame) -> str:
    """Write an NLL in nats with three decimals, or "exploded" above the runs' NLL at initialisation."""
    return EXPLODED if _explodes(nll, runs) else three_digits(nll)


def nll_detail(spread: Spread, runs: Frame) -> str:
    """Write the line below an NLL; ends above the runs' NLL at initialisation in powers of ten."""
    return spread.detail(lambda nll: power(nll) if _explodes(nll, runs) else three_digits(nll))
