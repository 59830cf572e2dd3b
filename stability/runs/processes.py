"""Tell which process wrote something, and whether it still lives. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")
HIDDEN = "hidden"


@dataclass(frozen=True)
class Process:
    """A process of some machine. ``machine``: where ``pid`` means something; ``started``: tells it from a later process
    that was given the same number."""

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), machine(), os.getpid(), started(os.getpid()) or "")

    @property
    def lives(self) -> bool | None:
        """Whether the process is running; None where that cannot be seen from here: on another machine, or another
        user's on one that hides them."""
        seen = started(self.pid) if self.machine == machine() else HIDDEN
        return None if seen == HIDDEN else seen == self.started

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@cache
def machine() -> str:
    """Return eight digits that two processes share if and only if they see one another's numbers: same host, not
    restarted since, same container."""
    parts = [socket.gethostname()]
    if (PROC / "sys/kernel/random/boot_id").exists():
        parts += [(PROC / "sys/kernel/random/boot_id").read_text().strip(), str((PROC / "self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def started(pid: int) -> str | None:
    """Return when a process of this machine began, in whatever unit the system counts; None where there is none,
    `HIDDEN` where it belongs to another user and nothing is said of it. One that has ended and that nobody has waited
    for yet (a zombie) is none."""
    if not (PROC / "self/stat").exists():
        return _started_without_proc(pid)
    try:
        # the name, in parentheses, may hold anything
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return HIDDEN if _is_hidden(pid) else None
    return None if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether there is a process all the same: /proc may be mounted so that it shows each user its own only."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # ours: it began in this moment, after the look


def _started_without_proc(pid: int) -> str | None:
    """Return when a process began as ``ps`` tells it, e.g. on macOS."""
    found = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, start = found.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else start.strip()
