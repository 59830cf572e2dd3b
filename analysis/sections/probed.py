"""Make a probe's tables, the same of a study and of one run (`stability.probe`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis.drawing.typeset import Table
from analysis.measures import phase_tables, rows_of_run
from analysis.numbers.windows import windows
from analysis.study import wording
from analysis.study.load import Frame, Study
from stability.runs.words import Words


@dataclass(frozen=True)
class Probed:
    """A probe's rows, and what their captions say.

    Attributes:
        frames: rows by table, with ``series``, ``run_lr``, ``seed`` and ``order``.
        words: the objective's.
        origin: end of a caption, " One run." of a run.
        study: None of a run.
        ropes: settings ``rope`` of the layers; () if not known.
    """

    frames: Mapping[str, Frame]
    words: Words
    origin: str = ""
    study: Study | None = None
    ropes: Collection[str] = ()


@dataclass(frozen=True)
class ProbeTables:
    """The tables of a probe.

    Attributes:
        names: its tables of rows (`stability.runs.schema.PROBE_COLUMNS`); none is shown without the first.
        make: makes the printed tables.
    """

    names: Sequence[str]
    make: Callable[[Probed], list[Table]]

    def of_study(self, study: Study) -> list[Table]:
        """Return a study's tables; [] if no run was probed."""
        if self.names[0] not in study.probes:
            return []
        frames = {name: study.probed(name) for name in self.names if name in study.probes}
        return self.make(Probed(frames, wording.words(study), study=study))

    def at_best(self, study: Study) -> list[Table]:
        """Return a study's tables of the first rows alone, each series at its own best rate."""
        best = {name: each.median.best_lr for name, each in windows(study).items() if each.median}
        rows = study.probed(self.names[0])
        at_best = rows[rows["run_lr"] == rows["series"].map(best)]
        return self.make(Probed({self.names[0]: at_best}, wording.words(study), " At each one's best rate."))

    def of_run(
        self, frames: Mapping[str, Frame], series: str, words: Words, ropes: Collection[str] = ()
    ) -> list[Table]:
        """Return the same of one run.

        Args:
            frames: the run's rows by table.
            series: its name in the tables.
            words: its objective's words.
            ropes: settings ``rope`` of its layers.
        """
        rows = {name: rows_of_run(frames[name], series) for name in self.names if name in frames}
        return self.make(Probed(rows, words, " One run.", ropes=ropes))


def one_table(name: str, table: Callable[[Frame, str, Probed], Table]) -> ProbeTables:
    """Return the tables of a probe with one table a phase.

    Args:
        name: of the rows.
        table: makes it of a phase's rows, the phase's name, and all that was probed.
    """
    return ProbeTables(
        (name,),
        lambda found: phase_tables(found.frames[name], lambda rows, phase: [table(rows, phase, found)]),
    )
