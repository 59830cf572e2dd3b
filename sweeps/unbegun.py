"""Restore a study if its launcher refuses the runs only at submission.

Examples: sbatch rejects the partition, or Ray does not start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stability.config.launchers import SlurmSpec
from stability.runs.cleaning import remove_run
from stability.runs.directory import read_json, write_atomically
from stability.runs.study import StudyFolder
from sweeps.trial import Trial

EXECUTORS = get_args(SlurmSpec.model_fields["executor"].annotation)


@contextmanager
def put_back_unless_begun(study: StudyFolder, trials: Sequence[Trial], own: Path) -> Iterator[None]:
    """Put the study's files back if the ``with`` block raises before any trial began.

    The files are ``study.json``, the runs' folders and the launcher's folder. A queued trial counts as begun.

    Args:
        study: the study.
        trials: the trials to launch.
        own: the launcher's own folder.
    """
    before = _Before.of(study, trials, own)
    try:
        yield
    except Exception:
        if not before.is_begun():
            before.put_back()
        raise


@dataclass(frozen=True)
class _Before:
    """A study, its runs and its launcher's folder before the launch.

    Attributes:
        study: the study.
        own: the launcher's folder.
        record: the bytes of ``study.json``, or None if it did not exist.
        fresh: trials without a folder.
        files: for each other trial's folder, its files' modification times in nanoseconds.
        made: paths in the launcher's folder.
        jobs: the content of the launcher's job files.
        missing: folders that did not exist, innermost first.
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
        """Return the present state, before the launch writes anything."""
        fresh = tuple(trial for trial in trials if not trial.directory.path.exists())
        folders = (trial.directory.path for trial in trials if trial not in fresh)
        return cls(
            study,
            own,
            study.file.read_bytes() if study.file.exists() else None,
            fresh,
            {folder: _read_change_times(folder) for folder in folders},
            frozenset(own.rglob("*")),
            _jobs(own),
            tuple(folder for folder in (own, study.path, study.path.parent) if not folder.exists()),
        )

    def is_begun(self) -> bool:
        """Return whether a run wrote more than its spec or a launcher queued jobs."""
        queued = {path: jobs for path, jobs in _jobs(self.own).items() if jobs and jobs != self.jobs.get(path)}
        beyond_specs = [
            path for trial in self.fresh for path in trial.directory.path.glob("*") if path != trial.directory.spec_file
        ]
        return bool(
            queued or beyond_specs or any(_read_change_times(folder) != files for folder, files in self.files.items())
        )

    def put_back(self) -> None:
        """Remove new files and rewrite the old record.

        A run stays if another study lists it or a process works on it.
        """
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
            with suppress(OSError):  # another process has written there
                folder.rmdir()
        for trial in self.fresh:
            with suppress(ValueError):  # a damaged study may list the run: it stays
                remove_run(trial.directory)


def _read_change_times(folder: Path) -> dict[Path, int]:
    """Return each file's modification time in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def _jobs(own: Path) -> dict[Path, Any]:
    """Return the content of a launcher's records of queued jobs; only Slurm's launcher has any."""
    # by name: jobs write their ends as JSON into the same folder (`sweeps.launchers.slurm.job.end_file`)
    return {path: read_json(path) for executor in EXECUTORS if (path := own / f"{executor}.json").exists()}
