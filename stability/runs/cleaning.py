"""Find unneeded files of a pool: unlisted runs and dead processes' leftovers. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from stability.runs.directory import RunDirectory, read_json
from stability.runs.leftovers import abandoned, leftovers, remove, temporary
from stability.runs.lock import RunLock
from stability.runs.study import StudyFolder

RUN_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Unlisted:
    """A run that no study lists.

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
    def of(cls, directory: RunDirectory) -> Unlisted:
        try:
            state = directory.status()["state"]
        except (ValueError, KeyError):
            state = "damaged"
        owner = RunLock(directory.path).owner()
        num_bytes = sum(path.lstat().st_size for path in directory.path.rglob("*") if path.is_file())
        return cls(directory, _label(directory), state, num_bytes, str(owner or ""))


def unlisted_runs(pool: Path) -> list[Unlisted]:
    """Return the runs of the pool that no study lists, by id.

    Raises:
        ValueError: a study's record is unreadable (`listed`), or the pool has runs but no study, as if the folder of
            studies were not mounted.
    """
    known, runs = listed(pool), _runs(pool)
    if runs and not StudyFolder.all_of(pool):
        raise ValueError(
            f"{pool} holds {len(runs)} run{'s' * (len(runs) > 1)} and no study (studies/NAME/study.json), so which are "
            "needed is not known; nothing is removed.\nTo remove all of them: rm -r the runs' folders"
        )
    return [Unlisted.of(directory) for directory in runs if directory.run_id not in known]


def listed(pool: Path) -> set[str]:
    """Return the ids of all runs in any study.

    Raises:
        ValueError: a study's record is unreadable, so its runs would count as unlisted.
    """
    ids: set[str] = set()
    for folder in sorted(path for path in (pool / "studies").glob("*") if path.is_dir()):
        if not (study := StudyFolder(folder)).file.exists():
            raise ValueError(
                f"{folder} has no study.json, so which runs it lists is not known; nothing is removed until it is "
                "repaired or moved away"
            )
        try:
            ids |= study.run_ids_on_record()
        except ValueError as error:
            raise ValueError(
                f"{error}.\nNothing is removed before that: runs that no study lists again would be"
            ) from None
    return ids


def debris(pool: Path) -> list[Path]:
    """Return temporary files of dead processes in the pool, its studies and unlocked runs."""
    found = [
        path
        for folder in (pool, *(pool / "studies").glob("*"), *(pool / "studies").glob("*/results"))
        for path in abandoned(folder)
    ]
    return found + [
        path
        for directory in _runs(pool)
        if RunLock(directory.path).owner() is None
        for path in leftovers(directory.path)
    ]


def remove_run(directory: RunDirectory) -> bool:
    """Remove a run unless it is locked or listed by now; return whether it was removed."""
    lock = RunLock(directory.path)
    if not lock.acquire():
        return False
    try:
        pool = directory.path.parent
        if directory.run_id in listed(pool):
            return False
        # Renamed first: no other process may read half a run.
        aside = temporary(directory.path)
        directory.path.replace(aside)
    finally:
        lock.release()
    remove(aside)
    return True


def remove_debris(pool: Path) -> int:
    """Remove temporary files of dead processes; return their number.

    Files inside a run are removed under the run's lock.
    """
    paths = debris(pool)
    runs = {directory.path: directory for directory in _runs(pool)}
    for path in paths:
        run = next((parent for parent in path.parents if parent in runs), None)
        lock = None if run is None else RunLock(run)
        if lock is None or lock.acquire():
            remove(path)
            if lock is not None:
                lock.release()
    return len(paths)


def _runs(pool: Path) -> list[RunDirectory]:
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
