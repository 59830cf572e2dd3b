"""Remove runs and studies of a pool, and dead processes' leftovers. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stability.registry import near_misses
from stability.runs.directory import RunDirectory, read_json
from stability.runs.leftovers import find_abandoned, find_leftovers, name_temporary, remove
from stability.runs.lock import RunLock
from stability.runs.study import StudyFolder
from stability.runs.words import shown_status

RUN_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class StoredRun:
    """A run in the pool that may be removed.

    Attributes:
        directory: its folder.
        label: mechanism, learning rate and seed.
        state: its verdict, or the reason for none.
        num_bytes: size on disk.
        owner: "host:pid" of the lock's holder, else ""; a held lock protects the run.
    """

    directory: RunDirectory
    label: str
    state: str
    num_bytes: int
    owner: str

    @classmethod
    def of(cls, directory: RunDirectory) -> StoredRun:
        try:
            state = shown_status(directory.status())
        except (ValueError, KeyError):
            state = "damaged"
        owner = RunLock(directory.path).owner()
        num_bytes = sum(path.lstat().st_size for path in directory.path.rglob("*") if path.is_file())
        return cls(directory, _label(directory), state, num_bytes, str(owner or ""))


def unlisted_runs(pool: Path) -> list[StoredRun]:
    """Return the runs of the pool that no study lists, by id.

    Raises:
        ValueError: a study's record is unreadable (`list_run_ids`), or the pool has runs but no study, as if the
            folder of studies were not mounted.
    """
    known, runs = list_run_ids(pool), runs_of(pool)
    if runs and not StudyFolder.list_studies(pool):
        raise ValueError(
            f"{pool} holds {len(runs)} run{'s' * (len(runs) > 1)} and no study (studies/NAME/study.json), so which are "
            "needed is not known; nothing is removed.\nTo remove all of them: rm -r the runs' folders"
        )
    return [StoredRun.of(directory) for directory in runs if directory.run_id not in known]


@dataclass(frozen=True)
class Deletion:
    """A study or run to delete, and the runs that go with it.

    Attributes:
        study: the study; None for a run alone.
        runs: runs to remove.
        shared: runs that stay, by id, with the other studies that list them.
        listed_by: the only study that lists a run to be deleted alone; None for none.
    """

    study: StudyFolder | None
    runs: tuple[StoredRun, ...]
    shared: dict[str, tuple[str, ...]]
    listed_by: StudyFolder | None = None

    @classmethod
    def of(cls, pool: Path, name: str) -> Deletion:
        """Find the study or the run of this name in the pool.

        Raises:
            ValueError: there is none, a study cannot be read, a process works on a run of it, or several studies list
                the run.
        """
        users, studies = users_of_runs(pool), {each.path.name: each for each in StudyFolder.list_studies(pool)}
        if name not in studies and RUN_ID.fullmatch(name):
            return cls._find_run(pool, name, users.get(name, ()))
        if name not in studies:
            near = near_misses(name, tuple(studies)) if studies else "it has none"
            raise ValueError(f"delete={name}: no study or run of that name in {pool}; {near}")
        ids = {run_id for run_id, names in users.items() if name in names}
        shared = {
            run_id: tuple(each for each in users[run_id] if each != name)
            for run_id in sorted(ids)
            if len(users[run_id]) > 1
        }
        own = tuple(StoredRun.of(each) for each in runs_of(pool) if each.run_id in ids - shared.keys())
        _require_idle(own)
        return cls(studies[name], own, shared)

    @classmethod
    def _find_run(cls, pool: Path, run_id: str, users: Sequence[str]) -> Deletion:
        directory = next((each for each in runs_of(pool) if each.run_id == run_id), None)
        if directory is None:
            raise ValueError(f"delete={run_id}: no run of that id in {pool}")
        if len(users) > 1:
            raise ValueError(
                f"{run_id} stays: the studies {', '.join(users)} list it; delete the studies that are not needed"
            )
        runs = (StoredRun.of(directory),)
        _require_idle(runs)
        return cls(None, runs, {}, StudyFolder.of(pool, users[0]) if users else None)

    def apply(self) -> int:
        """Remove the study or take the run off its study's record, then remove the runs; return their number."""
        if self.study is not None:
            aside = name_temporary(self.study.path)  # renamed first: no other process may read half a study
            self.study.path.replace(aside)
            remove(aside)
        elif self.listed_by is not None:
            self.listed_by.drop_run(self.runs[0].directory.run_id)
        return sum(remove_run(run.directory) for run in self.runs)


def _require_idle(runs: Sequence[StoredRun]) -> None:
    if busy := next((run for run in runs if run.owner), None):
        raise ValueError(f"{busy.owner} works on {busy.directory.run_id} ({busy.label}); stop that sweep first")


def list_run_ids(pool: Path) -> set[str]:
    """Return the ids of all runs in any study; ValueError as in `users_of_runs`."""
    return set(users_of_runs(pool))


def users_of_runs(pool: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the studies that list each run, by the run's id.

    Raises:
        ValueError: a study's record is unreadable, so its runs would count as unlisted.
    """
    users: dict[str, tuple[str, ...]] = {}
    folders = (path for path in (pool / "studies").glob("*") if path.is_dir() and not path.name.startswith("."))
    for folder in sorted(folders):
        if not (study := StudyFolder(folder)).file.exists():
            raise ValueError(
                f"{folder} has no study.json, so which runs it lists is not known; nothing is removed until it is "
                "repaired or moved away"
            )
        try:
            ids = study.run_ids_on_record()
        except ValueError as error:
            raise ValueError(
                f"{error}.\nNothing is removed before that: runs that no study lists again would be"
            ) from None
        users |= {run_id: (*users.get(run_id, ()), folder.name) for run_id in ids}
    return users


def find_debris(pool: Path) -> list[Path]:
    """Return temporary files of dead processes in the pool, its studies and unlocked runs."""
    found = [
        path
        for folder in (pool, pool / "studies", *(pool / "studies").glob("*"), *(pool / "studies").glob("*/results"))
        for path in find_abandoned(folder)
    ]
    return found + [
        path
        for directory in runs_of(pool)
        if RunLock(directory.path).owner() is None
        for path in find_leftovers(directory.path)
    ]


def remove_run(directory: RunDirectory) -> bool:
    """Remove a run unless it is locked or listed by now; return whether it was removed."""
    lock = RunLock(directory.path)
    if not lock.acquire():
        return False
    try:
        pool = directory.path.parent
        if directory.run_id in list_run_ids(pool):
            return False
        # Renamed first: no other process may read half a run.
        aside = name_temporary(directory.path)
        directory.path.replace(aside)
    finally:
        lock.release()
    remove(aside)
    return True


def remove_debris(pool: Path) -> int:
    """Remove temporary files of dead processes; return their number.

    Files inside a run are removed under the run's lock.
    """
    paths = find_debris(pool)
    runs = {directory.path: directory for directory in runs_of(pool)}
    for path in paths:
        run = next((parent for parent in path.parents if parent in runs), None)
        lock = None if run is None else RunLock(run)
        if lock is None or lock.acquire():
            remove(path)
            if lock is not None:
                lock.release()
    return len(paths)


def runs_of(pool: Path) -> list[RunDirectory]:
    """Return the pool's certain runs: real folders (no links) named by 12 hex digits, with a spec."""
    folders = (
        path for path in pool.glob("*") if RUN_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
    return [RunDirectory.at(path) for path in sorted(folders) if (path / "spec.json").is_file()]


def _label(directory: RunDirectory) -> str:
    try:
        spec = read_json(directory.spec_file)
        return f"{spec['mechanism']['name']} lr={spec['lr_peak']:g} seed={spec['seed']}"
    except (ValueError, KeyError, TypeError):
        return "damaged spec.json"
