"""Temporary names of files being written, and cleanup after killed processes. No torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from stability.runs.processes import machine, read_start_time

TEMPORARY = re.compile(r"\..+\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)\.tmp")
ABANDONED_S = 86_400.0  # age limit for files of another machine's processes


def name_temporary(path: Path) -> Path:
    """Return a hidden neighbour of ``path`` to write into or to move it to.

    Its name includes this machine and process.
    """
    return path.with_name(f".{path.name}.{machine()}-{os.getpid()}.tmp")


def find_leftovers(folder: Path) -> list[Path]:
    """Return all temporary files in a run's folder and its subfolders.

    The holder of the run's lock may remove them: no other process writes there, except ``RunDirectory.write_spec``, and
    that tolerates the removal.
    """
    if not folder.is_dir():
        return []
    folders = [folder, *(path for path in folder.iterdir() if path.is_dir() and not TEMPORARY.fullmatch(path.name))]
    return [path for each in folders for path in each.glob(".*.tmp") if TEMPORARY.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def find_abandoned(folder: Path) -> list[Path]:
    """Return dead processes' temporary files in a folder without a lock.

    Another machine's count as abandoned after a day without change.
    """
    named = [(path, TEMPORARY.fullmatch(path.name)) for path in folder.glob(".*.tmp")]
    return [path for path, match in named if match and _is_abandoned(path, match["machine"], int(match["pid"]))]


def remove_abandoned(folder: Path) -> None:
    for path in find_abandoned(folder):
        remove(path)


def _is_abandoned(path: Path, its_machine: str, pid: int) -> bool:
    if its_machine == machine():
        return read_start_time(pid) is None
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:
        return False
