"""Studies as the page shows them: read from their files, and read again only where a file has changed."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.config.base import STUDY_NAME
from stability.runs.directory import FINISHED, RunDirectory, mtime_ns
from stability.runs.older import OlderFile
from stability.runs.study import RUN_ID, StudyFolder
from stability.web.jobs import REPORT, SWEEP, Job, find_job

if TYPE_CHECKING:
    from analysis.drawing.typeset import Table
    from analysis.study.load import Study
    from sweeps.progress import Row
    from sweeps.view.study_view import StudyView

POLL_S = 0.9  # several open pages share a poll


class Watched:
    """One study."""

    def __init__(self, folder: StudyFolder):
        self.folder, self.name = folder, folder.path.name
        self.version, self.damage = 0, ""
        self._lock = threading.Lock()
        self.view: StudyView | None = None  # at the last poll; None before its sweep has written a record
        self._polled_at, self._record_at, self._seen = 0.0, -1, ()
        self._tables: dict[Path, tuple[int, Any]] = {}
        self._study: tuple[int, Study | None] = (-1, None)

    @property
    def job(self) -> Job | None:
        """The sweep that the page has started, or None."""
        return find_job(self.folder.path, SWEEP)

    @property
    def report_job(self) -> Job | None:
        """The report that the page has started, or None."""
        return find_job(self.folder.path, REPORT)

    @property
    def rows(self) -> list[Row]:
        """The runs at the last poll."""
        return [] if self.view is None else self.view.progress.rows

    @property
    def heading(self) -> list[str]:
        """The lines of `stability.status` on the study; [] before its record."""
        return [line.removeprefix(f"{self.name}: ") for line in (self.view.heading() if self.view else ())]

    @property
    def command(self) -> str:
        """The command line that made or continues the study."""
        if (job := self.job) is not None:
            return f"python -m stability.sweep {shlex.join(job.words)}"
        return str(self.view.record.get("command", "")) if self.view else ""

    @property
    def words(self) -> list[str] | None:
        """The words that continue the study; None where its record does not say them one by one."""
        if (job := self.job) is not None:
            return list(job.words)
        parts = self.command.split(" ")
        words = parts[3:] if parts[1:3] == ["-m", "stability.sweep"] else [""]
        # a record joins the words by spaces, so those with spaces or quotes of their own cannot be told apart
        return words if all("=" in word and not set("'\"\\") & set(word) for word in words) else None

    def poll(self) -> int:
        """Look at the files, and return a number that grows with each change; one `stat` for a finished run."""
        with self._lock:
            if time.monotonic() - self._polled_at < POLL_S:
                return self.version
            try:
                self._read()
            except (ValueError, OlderFile) as error:
                self.damage = str(error)
            job, report = self.job, self.report_job
            jobs = [(each.is_running, each.started_at) for each in (job, report) if each is not None]
            rows = [(row.state, row.step, row.val_nll, row.phase, row.ended_at) for row in self.rows]
            seen = (self.damage, tuple(jobs), tuple(rows), mtime_ns(job.log) if job is not None else 0)
            if seen != self._seen:
                self._seen, self.version = seen, self.version + 1
            self._polled_at = time.monotonic()
            return self.version

    def _read(self) -> None:
        from sweeps.view.study_view import StudyView

        changed = mtime_ns(self.folder.file)
        if not changed:
            return
        if self.view is None or changed != self._record_at or self.view.unreadable:
            self.view, self._record_at = StudyView.of(self.folder), changed
        self.damage = ""
        self.view.progress.poll()

    def study(self) -> Study | None:
        """Return the study as the report reads it; None before a run has ended."""
        with self._lock:
            if self._study[0] != self.version:
                self._study = (self.version, self._load())
            return self._study[1]

    def window_table(self) -> Table | None:
        """Return the report's table of windows; None before a run has ended."""
        study = self.study()
        if study is None or study.is_search:
            return None
        from analysis.sections.nll import window_table

        return window_table(study)

    def _load(self) -> Study | None:
        from analysis.study.load import of_rows
        from stability.runs.results import spec_columns, varied_fields

        if self.view is None or not any(row.verdict for row in self.rows):
            return None
        record, stopped = self.view.record, self.view.record.get("stopped", {})
        varied, variants = varied_fields(record), record.get("variants", {})
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            run_id = row.trial.run_id
            state = row.verdict or {"stalled": "running"}.get(row.state, row.state)
            own = {"study": self.name, "run_id": run_id, "status": state, "reason": stopped.get(run_id, row.reason)}
            rows.append(spec_columns(row.trial.spec, varied) | own | row.result | {"variant": variants.get(run_id, "")})
        return of_rows({**record, "name": self.name}, rows, list(self._recorded_steps()))

    def _recorded_steps(self) -> Iterator[Any]:
        """Yield the tables of α_max, each read once; the collected table instead of those of its runs."""
        import pandas as pd

        from stability.runs.results import read_steps

        collected = self.folder.results / "curvature.parquet"
        known: set[str] = set()
        if at := mtime_ns(collected):
            if self._tables.get(collected, (0, None))[0] != at:
                self._tables[collected] = (at, pd.read_parquet(collected))
            table = self._tables[collected][1]
            known = set(table["run_id"])
            yield table
        for row in self.rows:
            folder = row.trial.directory.curvature_file("").parent
            changed = mtime_ns(folder) if row.verdict in FINISHED else 0
            if not changed or (row.trial.run_id in known and changed < at):
                continue
            if self._tables.get(folder, (0, None))[0] != changed:
                tables, _ = read_steps(row.trial.directory)
                self._tables[folder] = (changed, [each for each in tables if len(each)])
            if row.trial.run_id not in known:
                yield from self._tables[folder][1]


class Pool:
    """All studies and runs of a folder."""

    def __init__(self, runs_dir: Path):
        self.path = runs_dir.resolve()
        self._watched: dict[str, Watched] = {}

    def names(self) -> list[str]:
        """Return the studies with a record or a job of the page, by name; a strange folder is left out."""
        files = [*(self.path / "studies").glob("*/study.json"), *(self.path / "studies").glob(f"*/{SWEEP}.json")]
        return sorted({file.parent.name for file in files if is_study_name(file.parent.name)})

    def study(self, name: str) -> Watched | None:
        """Return a study by name; None for an unknown one."""
        path = self.path / "studies" / name
        if not is_study_name(name) or path.resolve() != path or not path.is_dir():
            return None
        return self._watched.setdefault(name, Watched(StudyFolder(path)))

    def run(self, run_id: str) -> RunDirectory | None:
        """Return a run by id; None for an unknown one."""
        directory = RunDirectory(self.path, run_id)
        is_run = re.fullmatch(RUN_ID, run_id) and directory.path.is_dir() and not directory.path.is_symlink()
        return directory if is_run else None

    def studies_of(self, run_id: str) -> list[str]:
        """Return the names of the studies that list a run."""
        found = ((name, self.study(name)) for name in self.names())
        return [name for name, each in found if each is not None and run_id in _ids(each.folder)]


def is_study_name(name: str) -> bool:
    """Return whether a text is a valid name of a study."""
    return len(name) < 200 and re.fullmatch(STUDY_NAME, name) is not None


def find_file(folder: Path, name: str) -> Path | None:
    """Return a plain file below a folder; None for any other path, also through a link."""
    path = folder / name
    with suppress(OSError):  # a name too long for any file
        if path.is_file() and path.resolve() == path.absolute() and path.resolve().is_relative_to(folder):
            return path
    return None


def differences(spec: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return by dotted key each value of a spec that differs from another spec's, with that one."""
    from stability.cli.conf import flatten

    ours, theirs = dict(flatten(spec)), dict(flatten(base))
    keys = dict.fromkeys([*ours, *theirs])
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def _ids(study: StudyFolder) -> set[str]:
    try:
        return study.run_ids_on_record()
    except (ValueError, OlderFile):  # damaged, or not written yet
        return set()
