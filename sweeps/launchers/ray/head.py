"""Start Ray on this machine in a separate process; kill it at the end.

``python head.py FOLDER NUM_CPUS`` is the process. It starts Ray in FOLDER while the driver still imports torch, prints
the address, and lives until its standard input ends. Ray is killed without a shutdown: a sweep's state is in its run
folders, and `ray.shutdown` waits a second for each of Ray's processes.
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
    """The process of Ray's head.

    Attributes:
        scratch: folder of Ray's own files, removed at the end.
        num_threads: OpenMP threads of a worker.
        process: the process.
        access: environment variables required to join this Ray.
    """

    scratch: Path
    num_threads: int
    process: subprocess.Popen[str]
    access: dict[str, str] = field(repr=False)
    _address: str = field(default="", init=False)

    @property
    def address(self) -> str:
        """HOST:PORT, once Ray is up; raises a ``RuntimeError`` if Ray does not start."""
        assert self.process.stdout is not None
        self._address = self._address or self.process.stdout.readline().strip()
        if not self._address:
            said = (self.scratch / "head.err").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"Ray does not start on this machine ({said[-1] if said else self._end()}); try launcher=serial"
            )
        return self._address

    def require(self) -> None:
        """Raise a ``RuntimeError`` if the head, and so all of its Ray, has died.

        Any request to a dead Ray would block for minutes.
        """
        if self.process.poll() is not None:
            raise RuntimeError(
                f"Ray on this machine was ended from outside ({self._end()}); the same command goes on where this "
                "one stopped"
            )

    def _end(self) -> str:
        """Return the process's exit signal or code as text, once it has ended."""
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


_early: tuple[Head, ExitStack] | None = None


@contextmanager
def start_early(num_threads: int) -> Iterator[None]:
    """Start Ray before it is certain to be needed.

    The next `start_head` with equal ``num_threads`` within the ``with`` block uses it.
    """
    global _early
    with ExitStack() as stack:
        _early = stack.enter_context(_start(num_threads, None)), stack
        try:
            yield
        finally:
            _early = None


@contextmanager
def start_head(num_threads: int, num_cpus: int | None = None) -> Iterator[Head]:
    """Start Ray with ``num_cpus`` (None: all), without waiting for it.

    Its workers have ``num_threads`` OpenMP threads.
    """
    global _early
    with ExitStack() as stack:
        if _early is not None and _early[0].num_threads == num_threads and num_cpus is None:
            (found, begun), _early = _early, None
            stack.push(begun.pop_all())
        else:
            found = stack.enter_context(_start(num_threads, num_cpus))
        yield found


@contextmanager
def _start(num_threads: int, num_cpus: int | None) -> Iterator[Head]:
    """Start a head's process with its own temporary folder and reaper.

    Process and folder end with the ``with`` block.
    """
    from sweeps.launchers.ray.address import OWN
    from sweeps.launchers.ray.private import make_access
    from sweeps.reaper import start_reaper

    access = make_access()
    scratch = Path(tempfile.mkdtemp(prefix=OWN, dir=_short_temporary_folder()))
    try:
        with start_reaper(scratch), (scratch / "head.err").open("w") as errors:
            command = [sys.executable, __file__, str(scratch), str(num_cpus or ALL_CPUS)]
            # its own process group, so that the terminal's Ctrl-C does not reach it
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
    """Kill the head's process and close its pipes; the reaper kills its descendants."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _settings(num_threads: int, scratch: Path) -> dict[str, str]:
    """Return the environment of Ray's processes and their workers."""
    from sweeps.launchers import list_driver_variables, list_worker_variables

    # no prestarted workers: this process runs no tasks
    return {
        "RAY_TMPDIR": str(scratch),
        **list_driver_variables(),
        **list_worker_variables(num_threads),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }


def _short_temporary_folder() -> str | None:
    """Return a folder for Ray's sockets; None: the system's default is short enough.

    A socket's path is limited to 103 characters on macOS and 107 on Linux; Ray uses 89 itself.
    """
    return "/tmp" if len(tempfile.gettempdir()) > 14 and Path("/tmp").is_dir() else None


def _remove(folder: Path) -> None:
    """Remove Ray's files; its workers may write for a moment longer, because nothing waits for them."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _leave_out_services() -> None:
    """Leave out Ray's autoscaler, dashboard and log monitor.

    A Ray with one driver does not need them, and on a small machine they start slower than all the rest. `ray.init` has
    no switches for them. If other versions of Ray rename these methods, they simply start.
    """
    from ray._private.node import Node

    for name in ("start_monitor", "start_api_server", "start_log_monitor"):
        setattr(Node, name, lambda self, *_, **__: None)


def _serve(folder: str, num_cpus: str) -> None:
    """Start Ray below ``folder``, print its address, and wait for standard input's end.

    Ray makes its folder accessible to everybody. It gets one inside ``folder``; the latter stays 0700.
    """
    import logging

    import ray

    from sweeps.launchers.ray.private import require_loopback

    _leave_out_services()
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
    del sys.path[0]  # this file's folder; its modules must not shadow top-level ones
    _serve(*sys.argv[1:])
