"""Launchers of a sweep's trials; here what they share: Ctrl-C and the environment of workers.

The first Ctrl-C saves, the second stops at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager: the first SIGINT or SIGTERM sets `requested`, the next raises ``KeyboardInterrupt``.

    ``on_request`` runs inside the signal handler: it may set a value, but must not print or lock. Outside the main
    thread no handler is installed, because Python delivers no signals there.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None):
        self.requested = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], None] | int | None] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run_steps(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps until an interrupt is requested, then close and so save them."""
        with closing(steps):  # type: ignore[type-var]
            for _ in steps:
                yield
                if self.requested:
                    return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()


def list_worker_variables(threads: int) -> dict[str, str]:
    """Return the import path and OpenMP threads for workers.

    The import path makes an uninstalled checkout work from any folder.
    """
    path = dict.fromkeys(str(Path(entry).resolve()) for entry in sys.path if not entry or Path(entry).is_dir())
    return {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(threads)}


def list_driver_variables() -> dict[str, str]:
    """Return Ray's settings for the driver and its own processes."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",  # else a machine busy for a minute ends the driver
        # read at import: drop the raylet's messages; a dead worker is reported by its trial
        "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU share has no visible GPU
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # Tune's workers also run in the driver's folder
    }


@contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
