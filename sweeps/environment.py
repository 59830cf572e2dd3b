"""Set the environment variables of Ray and its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


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
