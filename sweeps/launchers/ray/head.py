"""Ray on this machine: a process beside the driver starts it, so that it comes up while the driver still imports torch,
and all of it is killed at the end.

``python ray_head.py FOLDER NUM_CPUS`` is that process: it starts Ray in FOLDER, prints the address, and lives until its
standard input ends. Nothing is asked of Ray before it dies: what a sweep knows is in its run directories, and
`ray.shutdown` gives each of Ray's processes a second to listen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 100 * 2**20
ALL_CPUS = "all"


@dataclass
class Head:
    """The process of Ray's head. ``scratch``: the folder for Ray's own files, removed with it; ``access``: environment
    for whoever may join that Ray."""

    scratch: Path
    num_threads: int
    process: subprocess.Popen[str]
    access: dict[str, str] = field(repr=False)
    _address: str = field(default="", init=False)

    @property
    def address(self) -> str:
        """HOST:PORT, once Ray is up. Errors: ``RuntimeError`` where it does not start."""
        assert self.process.stdout is not None
        self._address = self._address or self.process.stdout.readline().strip()
        if not self._address:
            said = (self.scratch / "head.err").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"Ray does not start on this machine ({said[-1] if said else self._end()}); try launcher=serial"
            )
        return self._address

    def require(self) -> None:
        """Raise a ``RuntimeError`` where the head has died, and with it all of its Ray: whoever asks that for anything
        then waits for minutes."""
        if self.process.poll() is not None:
            raise RuntimeError(
                f"Ray on this machine was ended from outside ({self._end()}); the same command goes on where this "
                "one stopped"
            )

    def _end(self) -> str:
        """Return in words how the process ended, once it has."""
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


_early: tuple[Head, ExitStack] | None = None


@contextmanager
def early(num_threads: int) -> Iterator[None]:
    """Begin to start Ray before it is known whether it will be needed: the next `head` of as many threads within the
    ``with`` block takes it over."""
    global _early
    with ExitStack() as stack:
        _early = stack.enter_context(_started(num_threads, None)), stack
        try:
            yield
        finally:
            _early = None


@contextmanager
def head(num_threads: int, num_cpus: int | None = None) -> Iterator[Head]:
    """Start Ray with ``num_cpus`` (None: all), without waiting for it; its workers have ``num_threads`` for OpenMP."""
    global _early
    with ExitStack() as stack:
        if _early is not None and _early[0].num_threads == num_threads and num_cpus is None:
            (found, begun), _early = _early, None
            stack.push(begun.pop_all())
        else:
            found = stack.enter_context(_started(num_threads, num_cpus))
        yield found


@contextmanager
def _started(num_threads: int, num_cpus: int | None) -> Iterator[Head]:
    """Start the process of a head, with a temporary folder and a reaper of its own; process and folder go with the
    ``with`` block."""
    from sweeps.launchers.ray.address import OWN
    from sweeps.launchers.ray.private import make_access
    from sweeps.reaper import reaper

    access = make_access()
    scratch = Path(tempfile.mkdtemp(prefix=OWN, dir=_short_temporary_folder()))
    try:
        with reaper(scratch), (scratch / "head.err").open("w") as errors:
            command = [sys.executable, __file__, str(scratch), str(num_cpus or ALL_CPUS)]
            # a group of its own: what is typed at the driver's terminal is not meant for it
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | _settings(num_threads, scratch) | access,
                text=True,
                process_group=0,
            )
            try:
                yield Head(scratch, num_threads, process, access)
            finally:
                _end(process)
    finally:
        _remove(scratch)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the head's process and close its pipes; what it has started is the reaper's to end."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _settings(num_threads: int, scratch: Path) -> dict[str, str]:
    """Return the environment of Ray's processes, and of the workers that descend from them."""
    from sweeps.environment import of_driver, of_workers

    # workers are started for the driver's actors, none for this process
    return {
        "RAY_TMPDIR": str(scratch),
        **of_driver(),
        **of_workers(num_threads),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }


def _short_temporary_folder() -> str | None:
    """Return a folder for Ray's sockets: their paths may have 103 characters (macOS; Linux: 107), and Ray takes 89
    itself; None: the system's own choice is short enough."""
    return "/tmp" if len(tempfile.gettempdir()) > 14 and Path("/tmp").is_dir() else None


def _remove(folder: Path) -> None:
    """Remove what Ray wrote; its workers, which nobody waits for, may write a moment longer."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _without_bystanders() -> None:
    """Leave out what a Ray of one machine, asked by nobody but its driver, has no use for, and what takes a small
    machine longer to start than all the rest: the autoscaler, the dashboard, the log monitor. `ray.init` has no
    switches of its own for them; where Ray calls them otherwise, they start."""
    from ray._private.node import Node

    for name in ("start_monitor", "start_api_server", "start_log_monitor"):
        setattr(Node, name, lambda self, *_, **__: None)


def _hold(folder: str, num_cpus: str) -> None:
    """Start Ray below ``folder``, print its address, and wait for the end of the standard input.

    Ray opens its folder to everybody. It gets one inside ``folder``, and that stays 0700.
    """
    import logging

    import ray

    from sweeps.launchers.ray.private import require_loopback

    _without_bystanders()
    cpus = None if num_cpus == ALL_CPUS else int(num_cpus)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
    context: Any = ray.init(
        address="local", num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=f"{folder}/r", **quiet
    )
    address = context.address_info["gcs_address"]
    require_loopback(address)
    print(address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules are no top-level ones
    _hold(*sys.argv[1:])
