"""View a study's progress from another terminal, from its files and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stability.runs.directory import INTERRUPTED, RunDirectory, read_json
from stability.runs.older import words_of_record
from stability.runs.phases import TERMINAL, file_of, list_phases, phases
from stability.runs.records import SpecFile
from stability.runs.study import StudyFolder
from sweeps.progress import STALLED, Progress, Row
from sweeps.trial import Trial, list_varied_axes
from sweeps.view.board import best_line, count_runs, counts_line, left_text, run_table

MOST_NAMED = 3
ALPHA_MAX = {"alpha_max", "critical_lr"}  # the measures in a run's curvature/<phase>.parquet


@dataclass(frozen=True)
class StudyView:
    """A study viewed from another terminal.

    Attributes:
        study: the study's folder.
        record: the content of its ``study.json``.
        progress: the runs with a readable spec.
        unreadable: (run id, reason) of the others.
        has_curvature: whether α_max was requested.
    """

    study: StudyFolder
    record: dict[str, Any]
    progress: Progress
    unreadable: tuple[tuple[str, str], ...]
    has_curvature: bool

    @classmethod
    def of(cls, study: StudyFolder) -> StudyView:
        """Read a study's record and runs.

        Raises:
            ValueError: the study does not exist or its record is damaged.
        """
        record = study.read()
        asked = record.get("spec", {})
        protocol = {"measure": ["alpha_max"], **asked.get("curvature", {})}  # a record may be older than `measure`
        curvature = protocol if asked.get("hessian") and ALPHA_MAX & set(protocol["measure"]) else None
        common: dict[str, Any] = {
            "pool": str(study.pool),
            "curvature": curvature,
            "generate": asked.get("generate"),
            "device": "auto",
            "sinks": None,
            "several": list_varied_axes(asked),
        }
        without: dict[str, Any] = {
            **common,
            "curvature": None,
            "generate": None,
        }  # the last command requests no measurements of earlier commands' runs
        earlier = _commands_of_earlier(record)
        trials, unreadable = [], []
        for run_id in dict.fromkeys(record["run_ids"]):
            try:
                spec = read_json(RunDirectory(study.pool, run_id).spec_file, SpecFile)
                asks = without if run_id in earlier else common
                trials.append(Trial(run_id, spec, variant=record.get("variants", {}).get(run_id, ""), **asks))
            except ValueError as error:
                unreadable.append((run_id, str(error)))
        progress = Progress(trials, is_complete, from_outside=True, words=words_of_record(record))
        return cls(study, record, progress, tuple(unreadable), curvature is not None)

    def renew(self) -> StudyView:
        """Return this view, or a new one if the study's runs have changed.

        A search or an extended sweep adds runs. A view with unreadable runs is always renewed.
        """
        return (
            self
            if self.study.read()["run_ids"] == self.record["run_ids"] and not self.unreadable
            else StudyView.of(self.study)
        )

    def line(self) -> str:
        """Return the counts and the time left in one line."""
        return "; ".join(filter(None, (counts_line(self.progress), self._describe_time_left())))

    @property
    def is_over(self) -> bool:
        """Whether every run has ended; a run in progress has not."""
        return all(row.ended for row in self.progress.rows)

    @property
    def is_worked_on(self) -> bool:
        return any(row.running for row in self.progress.rows)

    def heading(self) -> list[str]:
        """Return the lines above the runs, short because a terminal cuts them.

        Status and watch share them.
        """
        return [
            line
            for line in (
                f"{self.study.path.name}: {counts_line(self.progress)}",
                self._describe_time_left(),
                best_line(self.progress),
                self._describe_coverage(),
                self._describe_outside(),
            )
            if line
        ]

    def details(self) -> list[Any]:
        """Return the printable parts below the heading.

        They are running runs, unfinished ones, failed ones with their reasons, and the commands to continue.
        """
        parts: list[Any] = []
        if active := self._rows("running"):
            parts += ["", run_table(self.progress, active)]
        if stalled := self._rows(STALLED):
            parts += [
                "",
                f"{STALLED}: their status says running, but no process works on them; the same command goes on",
                *map(_half_way_line, stalled),
            ]
        if interrupted := self._rows(INTERRUPTED):
            parts += [
                "",
                f"{INTERRUPTED}: saved; the same command goes on from there",
                *map(_half_way_line, interrupted),
            ]
        if failed := self._rows("failed"):
            parts += ["", "failed:", *(line for row in failed for line in _failed_lines(row))]
        if not self.is_worked_on and (commands := self._commands()):
            parts += ["", *(f"goes on with: {command}" for command in commands)]
        return parts

    def _commands(self) -> list[str]:
        """Return the commands of unfinished runs."""
        earlier, last = _commands_of_earlier(self.record), self.record.get("command", "")
        asked = (earlier.get(row.trial.run_id, last) for row in self.progress.rows if not row.ended)
        return [command for command in dict.fromkeys(asked) if command]

    def _describe_outside(self) -> str:
        """Return a line on earlier commands' runs outside of the report, or ""."""
        apart = [each for each in self.record.get("earlier", []) if not each["reported"]]
        num = sum(len(each["run_ids"]) for each in apart)
        return f"on record outside of its report: {count_runs(num)} of earlier commands" if num else ""

    def _rows(self, state: str) -> list[Row]:
        return [row for row in self.progress.rows if row.state == state]

    def _describe_time_left(self) -> str:
        """Return the time left or "nobody works on it"; "" once all runs have ended."""
        left = left_text(self.progress) if self.is_worked_on else "" if self.is_over else "nobody works on it"
        return "; ".join(filter(None, (left, self._describe_unreadable())))

    def _describe_coverage(self) -> str:
        """Return a line on the number of measured runs, or "".

        Example: ``"α_max measured: 28 of 30 runs with a verdict (2 diverged: nothing to measure)"``. It is "" if α_max
        was not requested or no run has a verdict.
        """
        with_verdict = [row for row in self.progress.rows if row.trained_at and row.trial.curvature is not None]
        if not self.has_curvature or not with_verdict:
            return ""
        left_nothing = [row for row in with_verdict if row.state == "diverged" and not _has_checkpoint(row.trial)]
        measured = sum(has_alpha_max(row.trial) for row in with_verdict if row not in left_nothing)
        why = f" ({len(left_nothing)} diverged: nothing to measure)" if left_nothing else ""
        return f"α_max measured: {measured} of {count_runs(len(with_verdict))} with a verdict{why}"

    def _describe_unreadable(self) -> str:
        if not self.unreadable:
            return ""
        named = ", ".join(run_id for run_id, _ in self.unreadable[:MOST_NAMED]) + (
            ", …" if len(self.unreadable) > MOST_NAMED else ""
        )
        return f"{count_runs(len(self.unreadable))} without a readable spec.json ({named})"


def _commands_of_earlier(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the commands of runs from earlier commands, by run id."""
    return {run_id: each["command"] for each in record.get("earlier", []) for run_id in each["run_ids"]}


def is_complete(trial: Trial) -> bool:
    """Return whether the measurements after training exist, by file name.

    Only the sweep checks whether they match the current protocol.
    """
    return (trial.curvature is None or has_alpha_max(trial)) and (
        trial.generate is None or _has_samples(trial.directory, trial.generate)
    )


def has_alpha_max(trial: Trial) -> bool:
    file = trial.directory.curvature_file
    return all(file_of(file, name).exists() for name in list_phases(trial.directory, (trial.curvature or {})["phase"]))


def _has_checkpoint(trial: Trial) -> bool:
    """Return whether a run left a checkpoint of a phase with requested α_max."""
    return bool(phases(trial.directory, (trial.curvature or {})["phase"]))


def _has_samples(directory: RunDirectory, generate: dict[str, Any]) -> bool:
    """Return whether all possible samples exist.

    Samples need a terminal checkpoint: a run that diverged before its end has none.
    """
    if directory.status()["state"] == "diverged" and not phases(directory, TERMINAL):
        return True
    scores = directory.generation_file("terminal")
    return scores.exists() if generate["oracle"] is not None else (directory.path / "samples").is_dir()


def _half_way_line(row: Row) -> str:
    return f"  {row.trial.label} ({row.trial.run_id}) at {row.step}/{row.num_steps}"


def _failed_lines(row: Row) -> Iterable[str]:
    yield f"  {row.trial.label} ({row.trial.run_id}): {row.reason}"
    if place := row.trial.directory.find_raising_line():
        yield f"    at {place}"
    if row.trial.directory.traceback_file.exists():
        yield f"    traceback: {row.trial.directory.traceback_file}"
