"""Put a study back as it was where a launcher refuses its runs only when it is to hand them out: sbatch that knows no
such partition, a Ray that does not start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.runs.cleaning import remove_run
from stability.runs.directory import read_json, write_atomically
from stability.runs.study import StudyFolder
from sweeps.trial import Trial


@contextmanager
def put_back_unless_begun(study: StudyFolder, trials: Sequence[Trial], own: Path) -> Iterator[None]:
    """Put ``study.json``, the runs' folders and the launcher's ``own`` folder back as they were where the ``with``
    block raises an error and none of ``trials`` was begun or queued by then."""
    before = _Before.of(study, trials, own)
    try:
        yield
    except Exception:
        if not before.is_begun():
            before.put_back()
        raise


@dataclass(frozen=True)
class _Before:
    """A study, its runs and its launcher's folder as they were before the launch.

    ``record``: the bytes of ``study.json``; ``fresh``: trials that had no folder; ``files``: of each other trial, when
    its files were changed last; ``made``: what lay in the launcher's folder; ``jobs``: what its files said of jobs;
    ``missing``: folders that were not there, the innermost first.
    """

    study: StudyFolder
    own: Path
    record: bytes | None
    fresh: tuple[Trial, ...]
    files: dict[Path, dict[Path, int]]
    made: frozenset[Path]
    jobs: dict[Path, Any]
    missing: tuple[Path, ...]

    @classmethod
    def of(cls, study: StudyFolder, trials: Sequence[Trial], own: Path) -> _Before:
        """Return what there is now, before anything of the launch is written."""
        fresh = tuple(trial for trial in trials if not trial.directory.path.exists())
        folders = (trial.directory.path for trial in trials if trial not in fresh)
        return cls(
            study,
            own,
            study.file.read_bytes() if study.file.exists() else None,
            fresh,
            {folder: _changed_at(folder) for folder in folders},
            frozenset(own.rglob("*")),
            _jobs(own),
            tuple(folder for folder in (own, study.path, study.path.parent) if not folder.exists()),
        )

    def is_begun(self) -> bool:
        """Return whether a run has more than its spec by now, or a file changed, or a launcher queued jobs."""
        queued = {path: jobs for path, jobs in _jobs(self.own).items() if jobs and jobs != self.jobs.get(path)}
        beyond_specs = [
            path for trial in self.fresh for path in trial.directory.path.glob("*") if path != trial.directory.spec_file
        ]
        return bool(queued or beyond_specs or any(_changed_at(folder) != files for folder, files in self.files.items()))

    def put_back(self) -> None:
        """Remove what came since and write the record's bytes again. A run stays that another study lists, or that
        somebody works on."""
        for path in set(self.own.rglob("*")) - self.made:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self.record is None:
            self.study.file.unlink(missing_ok=True)
        else:
            write_atomically(self.study.file, self.record)
        for folder in self.missing:
            with suppress(OSError):  # somebody else has put something there by now
                folder.rmdir()
        for trial in self.fresh:
            with suppress(ValueError):  # a damaged study, which may list the run: it stays
                remove_run(trial.directory)


def _changed_at(folder: Path) -> dict[Path, int]:
    """Return when each file of a folder was changed last, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def _jobs(own: Path) -> dict[Path, Any]:
    """Return what the files of a launcher's folder say of jobs; a Slurm launcher's alone has such files."""
    return {path: read_json(path) for path in own.glob("*.json")}
