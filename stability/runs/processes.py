"""Identify processes and check whether they still live. No torch."""

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
    """A process on some machine.

    Attributes:
        host: host name.
        machine: scope of ``pid`` (`machine`).
        pid: number of the process.
        started: start time, to distinguish later processes of the same number.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), machine(), os.getpid(), read_start_time(os.getpid()) or "")

    @property
    def lives(self) -> bool | None:
        """Whether the process is running; None if unknown.

        Unknown: on another machine, or another user's process on a machine that hides those.
        """
        seen = read_start_time(self.pid) if self.machine == machine() else HIDDEN
        return None if seen == HIDDEN else seen == self.started

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@cache
def machine() -> str:
    """Return eight hex digits shared by processes with a common pid space.

    The pid space is that of one host, one boot and one container.
    """
    parts = [socket.gethostname()]
    if (PROC / "sys/kernel/random/boot_id").exists():
        parts += [(PROC / "sys/kernel/random/boot_id").read_text().strip(), str((PROC / "self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process of this machine, or None.

    The unit is the system's. A zombie gives None, too. `HIDDEN`: another user's process without visible details.
    """
    if not (PROC / "self/stat").exists():
        # e.g. on macOS
        found = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
        state, _, start = found.stdout.strip().partition(" ")
        return None if not state or state.startswith("Z") else start.strip()
    try:
        # the name, in parentheses, may contain any character
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return HIDDEN if _is_hidden(pid) else None
    return None if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether the process exists although /proc hides it from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # our own process, started after /proc was read
