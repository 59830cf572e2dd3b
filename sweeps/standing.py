"""Detect runs without a step for too long.

The process may hang in native code or on a file system while its lock's heartbeat continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from stability.runs.directory import RUNNING, RunDirectory

LEAST_S = 60.0
STEPS = 20  # a validation takes as long as a few steps
FIRST_S = 300.0  # limit before two steps are timed: imports, compilation, data preparation


def idle_s(directory: RunDirectory) -> float:
    """Return the seconds since a run last logged a step or changed its status.

    File modification times give the last change.
    """
    last = 0.0
    for file in (directory.metrics_file, directory.status_file):
        try:
            last = max(last, file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return time.time() - last


def standing_s(directory: RunDirectory, timing: Sequence[dict[str, Any]]) -> float | None:
    """Return a training run's seconds without a step, or None if not unusually long.

    Args:
        directory: the run's directory.
        timing: the last rows of its ``timing.jsonl``. The limit is 20 times their median step, at least 60 s; 300 s
            without timed steps.
    """
    # without gaps between a run and its resumption
    pairs = [(row["wall_s"] - before["wall_s"], row["step"] - before["step"]) for before, row in pairwise(timing)]
    seconds, steps = idle_s(directory), [seconds / steps for seconds, steps in pairs if seconds > 0 and steps > 0]
    return seconds if seconds > (max(LEAST_S, STEPS * median(steps)) if steps else FIRST_S) else None


def hangs(directory: RunDirectory, limit_s: float) -> bool:
    """Return whether a run in training had no step for more than ``limit_s`` seconds."""
    if idle_s(directory) <= limit_s:
        return False
    status = directory.status()
    return status["state"] == RUNNING and status.get("phase", "training") == "training"
