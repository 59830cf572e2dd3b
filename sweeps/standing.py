"""Find out how long a run has gone without a step, and when that is too long: its process may hang, in native code or
on a file system, though its lock's heartbeat goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from stability.runs.directory import RUNNING, RunDirectory

LEAST_S = 60.0
STEPS = 20  # a validation takes as long as a few of these
FIRST_S = 300.0  # before two steps are timed: importing, compiling, preparing data


def idle_s(directory: RunDirectory) -> float:
    """Return the seconds since a run logged a step or changed its status, by the times of these files."""
    last = 0.0
    for file in (directory.metrics_file, directory.status_file):
        try:
            last = max(last, file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return time.time() - last


def standing_s(directory: RunDirectory, timing: Sequence[dict[str, Any]]) -> float | None:
    """Return the seconds that a run in training has gone without a step, or None while that is no longer than usual.

    Args:
        directory: the run's.
        timing: the last rows of its ``timing.jsonl``; 20 times their median step is usual, and 60 s at least.
    """
    seconds, steps = idle_s(directory), _step_times(timing)
    return seconds if seconds > (max(LEAST_S, STEPS * median(steps)) if steps else FIRST_S) else None


def hangs(directory: RunDirectory, limit_s: float) -> bool:
    """Return whether a run in training has gone for more than ``limit_s`` without a step."""
    if idle_s(directory) <= limit_s:
        return False
    status = directory.status()
    return status["state"] == RUNNING and status.get("phase", "training") == "training"


def _step_times(timing: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds of each step; a run that was resumed begins its clock anew."""
    pairs = [(row["wall_s"] - before["wall_s"], row["step"] - before["step"]) for before, row in pairwise(timing)]
    return [seconds / steps for seconds, steps in pairs if seconds > 0 and steps > 0]
