"""Measure calls' time and memory side by side in one process, and check promises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # set before importing torch, to silence the profiler

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


class Promise(NamedTuple):
    """A measured number and its upper limit, or lower limit if ``at_least``."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    def __str__(self) -> str:
        met = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return (
            f"{'met' if met else 'MISSED':7s}{self.what:46s} {self.measured:6.2f}  "
            f"({'at least' if self.at_least else 'at most'} {self.limit:g})"
        )


def interleaved(
    calls: dict[str, Call], repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Measure each call's CPU seconds in turns, after one turn of warm-up.

    Args:
        calls: calls by name.
        repeats: turns.
        clock: seconds of this thread's CPU time, or of the process's for calls with threads of their own.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, repeats):
        for name, call in calls.items():
            start = clock()
            call()
            if turn >= 0:
                times[name].append(clock() - start)
    return times


def peak_bytes(call: Call, device: str = "cpu") -> int:
    """Return the call's peak of allocated bytes, beyond those allocated before."""
    call()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = (event for event in record.profiler.kineto_results.events() if event.name() == "[memory]")
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
