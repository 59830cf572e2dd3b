"""Define a section of the report, with a few helpers for all sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.drawing.pieces import Pieces, box, heading, shown
from analysis.drawing.typeset import Table
from analysis.numbers.step_shares import PHASES
from analysis.study.load import Study


@dataclass(frozen=True)
class Captioned:
    """A figure and the caption under it in the report."""

    figure: Figure
    caption: str


CONTINUED = "The figure above, continued."
Figures = Mapping[str, Captioned]
Drawn = Mapping[str, Pieces]


def is_of_rates(study: Study) -> bool:
    """Return whether the study compares learning rates, i.e. is not a search.

    In a search, each run has its own settings.
    """
    return not study.is_search


Printed = Callable[[Study, Sequence[str]], Sequence[Table | str]]


Body = Callable[[Study, Drawn], Pieces]


def make_printer(*parts: Callable[[Study], Iterable[Table | str | None]]) -> Printed:
    """Return a function that lists a study's tables and sentences, for any measured phases."""
    return lambda study, phases: [each for part in parts for each in part(study) if each is not None]


def list_one(table: Callable[[Study], Table | None]) -> Callable[[Study], list[Table | None]]:
    """Return a function that lists a section's one table."""
    return lambda study: [table(study)]


def has_probes(*names: str) -> Callable[[Study], bool]:
    """Return a function that decides whether a study compares rates and has probed these."""
    return lambda study: is_of_rates(study) and all(name in study.probes for name in names)


def has_data(find: Callable[[Study], object]) -> Callable[[Study], bool]:
    """Return a function that decides whether a study compares rates and ``find`` returns anything of it."""
    return lambda study: is_of_rates(study) and bool(find(study))


def has_logged(log: str, column: str) -> Callable[[Study], bool]:
    """Return a function that decides whether a study compares rates and a log has numbers in a column."""

    def find(study: Study) -> bool:
        return log in study.signals and column in study.signals[log] and study.signals[log][column].notna().any()

    return has_data(find)


def make_body(
    title: str = "",
    tables: Callable[[Study], Iterable[Table | None]] = lambda study: (),
    said: Callable[[Study], Sequence[str]] = lambda study: (),
    *,
    is_table_first: bool = False,
) -> Body:
    """Return a function for a section's pieces: a heading, its sentences in a box, its figures and its tables.

    Args:
        title: "" for a section under the previous heading.
        tables: tables of a study; None for those without rows.
        said: sentences.
        is_table_first: whether tables come before figures.
    """

    def body(study: Study, drawn: Drawn) -> Pieces:
        parts = (pictures(drawn), shown(tables(study)))
        head = (heading(title) if title else ()) + box(said(study))
        return head + sum(parts[::-1] if is_table_first else parts, ())

    return body


@dataclass(frozen=True)
class Section:
    """A section of the report; ``analysis.sections.contents.SECTIONS`` lists all in the report's order.

    Attributes:
        body: makes the section's pieces, including its heading, from the study and each figure's piece by name.
        applies: whether the study has the section's data; if not, nothing else is called.
        figures: figures with data by name. No two sections share a name: `analysis.export` names files by it.
        tables: tables and sentences printed at the end of a sweep, from the study and the phases with measured α_max.
        brief: as ``body``, for the appendix of a short report; None: the first table or figure.
    """

    body: Body
    applies: Callable[[Study], bool] = is_of_rates
    figures: Callable[[Study], Figures] = lambda study: {}
    tables: Printed = make_printer()
    brief: Body | None = None


def sourced(study: Study, figure: Figure, caption: str) -> Captioned:
    """Return a figure with its caption; the older way, when each caption ended with the data.

    Args:
        study: the figure's study.
        figure: the figure.
        caption: its text.
    """
    return Captioned(figure, caption)


def draw_by_phase(
    study: Study,
    kind: str,
    phases: Iterable[str],
    draw: Callable[[Study, str], Iterable[Figure]],
    caption: str,
) -> dict[str, Captioned]:
    """Return each phase's figures by ``<kind>-<phase>-<number>``.

    Args:
        study: the study.
        kind: begins the names.
        phases: phases to draw.
        draw: draws a phase's figures.
        caption: their text, with a field ``{phase}``.
    """
    return {
        f"{kind}-{phase}-{number}": Captioned(figure, caption.format(phase=PHASES.get(phase, phase)))
        for phase in phases
        for number, figure in enumerate(draw(study, phase))
    }


def continuation_name(name: str, number: int) -> str:
    """Return the name of a figure or of its continuation: ``curves``, ``curves-1``."""
    return f"{name}-{number}" if number else name


def pictures(drawn: Drawn) -> Pieces:
    """Return a section's figures one after another."""
    return tuple(piece for pieces in drawn.values() for piece in pieces)
