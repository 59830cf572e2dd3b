"""Define what a section of the report says of itself, and the few words that sections share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.tables import source
from analysis.drawing.typeset import Table
from analysis.numbers.step_shares import PHASES
from analysis.study.load import Study


@dataclass(frozen=True)
class Captioned:
    """A figure and the text that stands under it in the report."""

    figure: Figure
    caption: str


CONTINUED = "The figure above, continued."
Figures = Mapping[str, Captioned]
Drawn = Mapping[str, Pieces]


def is_of_rates(study: Study) -> bool:
    """Return whether the study compares learning rates, as all but a search do, whose runs each have settings of their
    own."""
    return not study.is_search


Printed = Callable[[Study, Sequence[str]], Sequence[Table | str]]


def printed(*parts: Callable[[Study], Iterable[Table | str]]) -> Printed:
    """Return what prints tables and sentences of a study, whatever phases were measured."""
    return lambda study, phases: [each for part in parts for each in part(study)]


def plain_body(
    title: str = "",
    tables: Callable[[Study], Iterable[Table | None]] = lambda study: (),
    *,
    is_table_first: bool = False,
) -> Callable[[Study, Drawn], Pieces]:
    """Return what makes the pieces of a section that is a heading, its figures and its tables.

    Args:
        title: "" for a section that goes on under the heading before it.
        tables: of a study, None among them for those without rows.
        is_table_first: whether tables stand before figures.
    """

    def body(study: Study, drawn: Drawn) -> Pieces:
        parts = (pictures(drawn), shown(tables(study)))
        return (heading(title) if title else ()) + sum(parts[::-1] if is_table_first else parts, ())

    return body


@dataclass(frozen=True)
class Section:
    """A part of the report. ``analysis.sections.contents.SECTIONS`` lists all of them in the report's order.

    ``body(study, drawn)``: the section's pieces, its heading included. ``drawn``: by name each of its figures, as the
    piece that shows it with its caption.
    ``applies(study)``: whether the study has what the section is about. Where not, nothing else is asked.
    ``figures(study)``: by name the figures that have data; the name is the file's in `analysis.export.write_figures`,
    and no two sections share one.
    ``tables(study, phases)``: what a sweep prints of the section at its end, tables and sentences. ``phases``: the
    checkpoints whose α_max the sweep measured.
    """

    body: Callable[[Study, Drawn], Pieces]
    applies: Callable[[Study], bool] = is_of_rates
    figures: Callable[[Study], Figures] = lambda study: {}
    tables: Printed = printed()


def sourced(study: Study, figure: Figure, caption: str) -> Captioned:
    """Return a figure whose caption ends with the data that it shows."""
    return Captioned(figure, f"{caption} {source(study)}")


def by_phase(
    study: Study,
    kind: str,
    phases: Iterable[str],
    draw: Callable[[Study, str], Iterable[Figure]],
    caption: str,
) -> dict[str, Captioned]:
    """Return what ``draw`` makes of each phase, by ``<kind>-<phase>-<number>``; ``caption`` names the ``{phase}``."""
    return {
        f"{kind}-{phase}-{number}": sourced(study, figure, caption.format(phase=PHASES.get(phase, phase)))
        for phase in phases
        for number, figure in enumerate(draw(study, phase))
    }


def numbered(name: str, number: int) -> str:
    """Return the name of a figure and of what continues it: ``curves``, ``curves-1``, …"""
    return f"{name}-{number}" if number else name


def pictures(drawn: Drawn) -> Pieces:
    """Return all figures of a section one after another."""
    return tuple(piece for pieces in drawn.values() for piece in pieces)
