"""Declare table columns, and build tables over places (series, learning rate, layer, …).

A column states its heading, the number per seed and the format. A level is a median with the seeds' range, a
difference a mean with its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import Mean, Spread
from analysis.numbers.step_shares import PHASES, phases_of
from analysis.study.load import Column, Frame
from analysis.words import lr_text, power

Form = Callable[[float], str]
three_digits: Form = "{:.3f}".format
four_digits: Form = "{:.4f}".format


def signed_nats(nats: float) -> str:
    return f"{round(nats, 4) + 0.0:+.4f}"  # +0.0000 instead of -0.0000


def percent(value: float) -> str:
    return "--" if np.isnan(value) else f"{100 * value:.4g} %"


def spread_cell(spread: Spread, form: Form = power) -> Cell:
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
    form: Form = power

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
