"""The runs of a study that an entry works on: those that have their verdict, each under its lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stability.runs.directory import RunDirectory
from stability.runs.lock import RunLock


def with_verdict(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The runs that reached their verdict; how many did not is printed. ``ValueError`` where that is the only one."""
    unfinished = [directory for directory in directories if not directory.finished]
    if unfinished and len(directories) == 1:
        raise ValueError(f"{unfinished[0].run_id} is {unfinished[0].status()['state']}; run its sweep to the end first")
    if unfinished:
        print(f"leaves out {len(unfinished)} of {len(directories)} runs, which have not reached their verdict")
    return [directory for directory in directories if directory.finished]


def locked(directory: RunDirectory, steps: Iterator[None]) -> Iterator[None]:
    """What writes into a run's folder, under the run's lock; nothing, and a line, where another process works on the run."""
    lock = RunLock(directory.path)
    if not lock.acquire():
        print(f"leaves out {directory.run_id}: {lock.owner() or 'another process'} works on it; the same command does the rest later")
        return
    try:
        yield from lock.during(steps)
    finally:
        lock.release()
