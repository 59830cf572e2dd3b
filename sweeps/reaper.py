"""Kill all processes of a driver's Ray after the driver's end or kill −9.

The reaper is a separate process with the standard library only. ``python reaper.py FOLDER`` reads its standard input;
only the driver holds the other end. End of input means that the driver is dead: the reaper kills the session's
processes and removes FOLDER, used by this session only. A byte before it means that the driver has shut Ray down: the
reaper kills the remaining processes, as after a failed start, except the driver itself.

A process belongs to the session if it inherited ``RAY_TMPDIR=FOLDER``, writes into FOLDER, or descends from such a
process. Its name never counts. (Ray's agents overwrite their environment with their title, but their logs are in
FOLDER.) Linux only: without /proc, Ray ends by itself within a minute or two.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc")
DEADLINE_S = 60.0
PAUSE_S = 0.2
QUIET_LOOKS = 5  # consecutive empty searches after the driver's death: a process may start during a search


@contextmanager
def start_reaper(folder: Path) -> Iterator[None]:
    """Start a reaper for processes started with ``RAY_TMPDIR=folder`` within the ``with`` block."""
    if not (PROC / "self/environ").exists():
        yield
        return
    # its own process session, so that the terminal's Ctrl-C does not reach it
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # the reaper was killed
            watcher.stdin.write(b".")
            watcher.stdin.close()
        watcher.wait()


def session(folder: str, but: frozenset[int] = frozenset()) -> set[int]:
    """Return the ids of a session's living processes, except those in ``but``."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for path in PROC.glob("[0-9]*"):
        if int(path.name) in but:
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's process
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            children.setdefault(int(fields[1]), []).append(int(path.name))
            if _has_inherited(path, folder) or _writes_into(path, folder):
                found.add(int(path.name))
    pending = list(found)
    while pending:
        pending = [child for parent in pending for child in children.get(parent, []) if child not in found]
        found.update(pending)
    return found


def _has_inherited(process: Path, folder: str) -> bool:
    return b"RAY_TMPDIR=" + os.fsencode(folder) in (process / "environ").read_bytes().split(b"\0")


def _writes_into(process: Path, folder: str) -> bool:
    """Return whether a process has a file below ``folder`` open for writing."""
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(descriptor).startswith(f"{folder}/"):  # noqa: PTH115 "pipe:[1]" is no path
                flags = next(
                    line
                    for line in (process / "fdinfo" / descriptor.name).read_text().splitlines()
                    if line.startswith("flags:")
                )
                if int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def reap(folder: str, but: frozenset[int], quiet_looks: int) -> None:
    """Kill a session's processes, then remove its folder.

    Args:
        folder: the session's folder.
        but: ids of processes to spare.
        quiet_looks: consecutive searches without a process before the end.
    """
    deadline, quiet = time.monotonic() + DEADLINE_S, 0
    while time.monotonic() < deadline:
        ids = session(folder, but)
        for pid in ids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if ids else quiet + 1
        if quiet >= quiet_looks:
            break
        time.sleep(PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    driver = os.getppid()
    if sys.stdin.buffer.read(1):
        reap(sys.argv[1], frozenset((os.getpid(), driver)), 1)
    else:
        reap(sys.argv[1], frozenset((os.getpid(),)), QUIET_LOOKS)
