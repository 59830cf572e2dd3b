"""Choose which checkpoints of a run are measured, and under which name. No torch.

``terminal``: of the run's last planned step. ``earliest``: the first. ``last``: the last of a run that diverged, where
that is not its earliest; it is no terminal one, since the run never came to its end. One checkpoint has one name only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stability.runs.directory import RunDirectory, read_json, step_of
from stability.runs.parquet import holds_rows
from stability.runs.records import SpecFile

TERMINAL, EARLIEST, LAST = "terminal", "earliest", "last"
PHASES = (EARLIEST, TERMINAL, LAST)


def phases(directory: RunDirectory, phase: str) -> dict[str, Path]:
    """Return the checkpoints that a run has of the phase asked for (of every one with ``all``), by the name of their
    phase; {} where there is none."""
    found = directory.checkpoints()
    if not found:
        return {}
    named: dict[str, Path] = {}
    whole = step_of(found[-1]) == planned_steps(directory)
    if len(found) > 1 or not whole:
        named[EARLIEST] = found[0]
    if whole:
        named[TERMINAL] = found[-1]
    elif len(found) > 1 and directory.status()["state"] == "diverged":
        named[LAST] = found[-1]
    return named if phase == "all" else {name: path for name, path in named.items() if name == phase}


def wanted(directory: RunDirectory, phase: str) -> tuple[str, ...]:
    """Return the phases that a measurement of a run leaves files of: those asked for, empty ones where there is no such
    checkpoint, but for `last`."""
    if phase not in ("all", LAST):
        return (phase,)
    last = tuple(phases(directory, LAST))
    return (EARLIEST, TERMINAL, *last) if phase == "all" else last


def planned_steps(directory: RunDirectory) -> int | None:
    """Return how many steps a run was to take; None in a folder without a spec."""
    return read_json(directory.spec_file, SpecFile)["steps"] if directory.spec_file.exists() else None


def file_of(file: Callable[[str], Path], phase: str) -> Path:
    """Return the file of a phase's table: ``file(phase)``, or the terminal phase's, as which code that knew no `last`
    wrote a diverged run's last checkpoint."""
    own = file(phase)
    if phase != LAST or own.exists():
        return own
    old = file(TERMINAL)
    try:
        return old if old.exists() and holds_rows(old) else own
    except ValueError:  # a damaged table counts as missing
        return own
