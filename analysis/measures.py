"""Declare what a table shows: a quantity once, with its heading, what a seed's rows come to, its number format and the
scale of its interval; and build tables of such quantities over the places (series, learning rate, layer, …) of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import POSITIVE, Scale, Spread
from analysis.numbers.step_shares import PHASES, phases_of
from analysis.study.load import Column, Frame
from analysis.words import lr_text, power

Form = Callable[[float], str]
three_digits: Form = "{:.3f}".format
four_digits: Form = "{:.4f}".format


def percent(value: float) -> str:
    return "--" if np.isnan(value) else f"{100 * value:.4g} %"


def spread_cell(spread: Spread, form: Form = power) -> Cell:
    """Return a cell of a median over seeds, its interval and n; ``--`` without any."""
    return Cell(form(spread.median), spread.detail(form)) if spread.n else Cell("--")


@dataclass(frozen=True)
class Measure:
    """A quantity of which a table shows the median over seeds, its interval and n.

    - ``label``: heads its column.
    - ``by_seed``: a number a seed, of the rows of one place.
    - ``form``: writes such a number; ``ends``: those of the interval, ``from … to``, where they may be negative.
    - ``scale``: of the interval (`analysis.numbers.spread.Scale`).
    """

    label: str
    by_seed: Callable[[Frame], Iterable[float]]
    form: Form = power
    scale: Scale = POSITIVE
    ends: Form | None = None

    def cell(self, rows: Frame) -> Cell:
        """Return the cell of one place."""
        spread = Spread.of(self.by_seed(rows), self.scale)
        if self.ends is None or spread.n < 2:
            return spread_cell(spread, self.form)
        return Cell(self.form(spread.median), f"{self.ends(spread.low)} to {self.ends(spread.high)}, n={spread.n}")


@dataclass(frozen=True)
class Text:
    """A column of words, or of a number without an interval: ``write`` writes it, of the rows of one place."""

    label: str
    write: Callable[[Frame], str]

    def cell(self, rows: Frame) -> Cell:
        return Cell(self.write(rows))


@dataclass(frozen=True)
class Place:
    """A column whose value is the same in all rows of a place, and says which place it is."""

    label: str
    column: str
    form: Callable[[Any], str] = str


SERIES, RATE, LAYER = (
    Place("mechanism", "series"),
    Place("LR", "run_lr", lr_text),
    Place("layer", "layer", "{:.0f}".format),
)


def over_rows(values: Callable[[Frame], Column], how: str = "median") -> Callable[[Frame], Column]:
    """Return what takes the median (or another summary, ``how``) over each seed's rows of a value a row."""
    return lambda rows: values(rows).groupby(rows["seed"]).agg(how)


def grid_table(
    title: str,
    caption: str,
    rows: Frame,
    places: Sequence[Place],
    measures: Sequence[Measure | Text],
    groups: Sequence[tuple[str, int]] = (),
) -> Table:
    """Return a table with a row for each place that the rows have, the series in the study's order.

    Args:
        title, caption: of the table.
        rows: with ``order`` (`Study.probed`), ``seed`` and the columns of the places.
        places: what tells the rows of the table apart, the first columns.
        measures: the columns after them.
        groups: headings over several columns, each with their number.
    """
    body = []
    for key, part in rows.groupby(["order", *(place.column for place in places)]):
        where = [Cell(place.form(value)) for place, value in zip(places, key[1:], strict=True)]
        body.append((*where, *(measure.cell(part) for measure in measures)))
    header = (*(place.label for place in places), *(measure.label for measure in measures))
    return Table(title, caption, header, tuple(body), tuple(groups))


def phase_tables(rows: Frame, make: Callable[[Frame, str], Iterable[Table]]) -> list[Table]:
    """Return what ``make`` makes of the rows of each phase and of its name, the terminal one first; nothing where it
    makes a table without rows."""
    named = ((phase, PHASES.get(phase, phase)) for phase in phases_of(rows))
    return [table for phase, name in named for table in make(rows[rows["phase"] == phase], name) if table.rows]


def rows_of_run(frame: Frame, name: str) -> Frame:
    """Return one run's own rows as those of a study of this series alone."""
    return frame.assign(series=name, run_lr=frame["lr"], seed=0, order=0)
