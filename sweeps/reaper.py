"""A process beside the driver outlives it and ends its Ray: after a kill −9 of the driver no process of Ray may live
on. Standard library only.

``python reaper.py FOLDER`` reads its standard input, whose other end the driver alone holds. Its end means that the
driver is gone: then the processes of its session are killed, and FOLDER, which no other session has, is removed. A byte
before it means that the driver has shut Ray down: what is left of the session, as after a start that failed, is killed
all the same, but for the driver itself. A process is of the session if it inherited ``RAY_TMPDIR=FOLDER``, writes into
FOLDER (Ray's agents overwrite their environment with their title, but their logs lie there), or descends from one that
is; never by its name. Linux only: without /proc Ray is left to end by itself, which takes it a minute or two.
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
QUIET_LOOKS = 5  # in a row, after a death: what is being started while it is looked for is found by the next look


@contextmanager
def reaper(folder: Path) -> Iterator[None]:
    """Start a reaper for what is started within the ``with`` block with ``RAY_TMPDIR=folder``."""
    if not (PROC / "self/environ").exists():
        yield
        return
    # a session of its own: what is typed at the driver's terminal is not meant for it
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody killed it
            watcher.stdin.write(b".")
            watcher.stdin.close()
        watcher.wait()


def session(folder: str, but: frozenset[int] = frozenset()) -> set[int]:
    """Return the ids of the living processes of a session, without those of ``but``."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for path in PROC.glob("[0-9]*"):
        if int(path.name) in but:
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone by now, or another user's
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            children.setdefault(int(fields[1]), []).append(int(path.name))
            if _inherited(path, folder) or _writes_into(path, folder):
                found.add(int(path.name))
    pending = list(found)
    while pending:
        pending = [child for parent in pending for child in children.get(parent, []) if child not in found]
        found.update(pending)
    return found


def _inherited(process: Path, folder: str) -> bool:
    return b"RAY_TMPDIR=" + os.fsencode(folder) in (process / "environ").read_bytes().split(b"\0")


def _writes_into(process: Path, folder: str) -> bool:
    """Return whether a process has a file below ``folder`` open for writing."""
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
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
    """Kill until ``quiet_looks`` in a row find nothing, then remove the folder."""
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
