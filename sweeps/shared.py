"""Share runs between concurrent sweeps, and restore a study if its launcher refuses the runs only at submission.

Runs are trained once. A launcher refuses late if, for example, sbatch rejects the partition, or Ray does not start.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stability.config.launchers import SlurmSpec
from stability.runs.directory import read_json, write_atomically
from stability.runs.study import StudyFolder
from sweeps.launchers import Interrupt
from sweeps.trial import Trial, mark_failed

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
        from stability.runs.cleaning import remove_run

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


POLL_S = 0.5
MOST_LAUNCHES = 2  # during the first, another sweep's worker may have released the run unfinished
SILENT = "its worker ended without a word"


def hand_out(
    trials: Sequence[Trial],
    *,
    is_done: Callable[[Trial], bool],
    on_tick: Callable[[], None],
    say: Callable[[str], None],
    interrupt: Interrupt,
) -> Iterator[list[Trial]]:
    """Yield trials to launch, until every trial has ended in this or another sweep.

    A run of another sweep is awaited, and yielded if left unfinished there. A failed run has ended. A free run is set
    ``failed`` if it has not ended after two launches.

    Args:
        trials: all trials of this launch.
        is_done: whether a trial has its verdict and its measurements.
        on_tick: called while it waits.
        say: prints a line for the user.
        interrupt: ends the wait and the iteration once requested.
    """
    pending, launches = list(trials), Counter()
    free = [trial for trial in pending if trial.find_other_owner() is None]
    while pending and not interrupt.requested:
        silent = [trial for trial in free if launches[trial.run_id] >= MOST_LAUNCHES]
        for trial in silent:
            mark_failed(trial, SILENT, f"{SILENT}\n")
        if ready := [trial for trial in free if trial not in silent]:
            launches.update(trial.run_id for trial in ready)
            yield ready
        pending, free = _list_unfinished(pending, is_done)
        holders = [str(owner) for trial in pending if (owner := trial.find_other_owner())]
        if holders and not interrupt.requested:
            say(
                f"waits for {len(holders)} run{'s' if len(holders) > 1 else ''} that another sweep works on "
                f"({', '.join(sorted(set(holders)))})"
            )
        while pending and not free and not interrupt.requested:
            on_tick()
            time.sleep(POLL_S)
            pending, free = _list_unfinished(pending, is_done)


def _list_unfinished(trials: Sequence[Trial], is_done: Callable[[Trial], bool]) -> tuple[list[Trial], list[Trial]]:
    """Return the unfinished trials, and those of them free of another sweep's lock."""
    # One check of the lock per trial, before the status: a status is written before the lock is released. With a second
    # check of the lock, a run that another sweep ended in between would count as free.
    left, free = [], []
    for trial in trials:
        is_held = trial.find_other_owner() is not None
        if is_held or not (trial.has_failed() or is_done(trial)):
            left.append(trial)
            if not is_held:
                free.append(trial)
    return left, free
