"""Measure a step of a kind of run, or read an earlier measurement by the same code on the same machine.

Measurements are in ``<pool>/cache/timings/<digest>.json``, each a day long.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stability.config.identity import essence
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.runs.answers import circumstances
from stability.runs.directory import read_json, write_json
from stability.runs.records import TimesFile
from stability.training.devices import peak_memory_mb
from stability.training.step import Replica

MAX_AGE_S = 86_400.0
TIMED_STEPS = 3  # most timed steps of a kind, after one step of warm-up
TIMED_S = 1.5  # seconds of timed steps of all kinds together; of each kind one step at least


@dataclass(frozen=True)
class Times:
    """Measured times of a kind of run.

    Attributes:
        step_s: seconds of a training step.
        validation_s: seconds of a validation.
        memory_mb: peak memory in MiB, as in `sweeps.costs.Timing`.
        is_stored: whether they were measured by an earlier command.
    """

    step_s: float
    validation_s: float
    memory_mb: float
    is_stored: bool = False


class StoredTimes:
    """The times of kinds of run that a pool remembers for a day.

    Args:
        pool: folder of the runs.
        device: device of the measurements.
    """

    def __init__(self, pool: Path, device: torch.device):
        self._pool, self._device = pool, device
        # computed once: it reads the state of all source files
        self._circumstances = circumstances([str(device)])

    def look_up(self, run: RunSpec, corpus: AbstractCorpus, timed_s: float) -> Times:
        """Return the times of a kind of run, measured now unless they are known.

        Args:
            run: a run of the kind.
            corpus: its data.
            timed_s: seconds for timed steps; one step is timed at least.
        """
        file = self._file(run)
        with suppress(ValueError):  # missing or damaged: measured anew
            found = read_json(file, TimesFile)
            if 0 <= time.time() - found["measured_at"] <= MAX_AGE_S:
                return Times(found["step_s"], found["validation_s"], found["memory_mb"], is_stored=True)
        times = measure_times(run, corpus, self._device, timed_s)
        if file.parents[1].is_dir():  # a plan without prepared data writes nothing
            with suppress(OSError):  # in a pool that can only be read, every plan measures
                write_json(file, {**asdict(times), "measured_at": time.time()})
        return times

    def _file(self, run: RunSpec) -> Path:
        recipe = essence(run.model_copy(update={"lr_peak": 1.0, "seed": 0}))
        digest = hashlib.sha256(f"{self._circumstances}\n{recipe}".encode()).hexdigest()
        return self._pool / "cache" / "timings" / f"{digest}.json"


def measure_times(run: RunSpec, corpus: AbstractCorpus, device: Any, timed_s: float) -> Times:
    """Time a training step and the first part of a validation.

    Args:
        run: the run.
        corpus: its data.
        device: its device.
        timed_s: seconds for timed steps; one step is timed at least.
    """
    # Each kind of run has its own peak. macOS has no such counter: the peak is then the largest so far.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5: the peak of resident memory
    replica = Replica(run, corpus, device)
    replica.train_step(1)
    step_s = time_step(replica, timed_s)
    part = replica.validation.shortened()
    started = time.perf_counter()
    part.measure(replica.model)
    validation_s = (time.perf_counter() - started) * replica.validation.num_sequences / part.num_sequences
    return Times(step_s, validation_s, peak_memory_mb(device))


def time_step(replica: Replica, timed_s: float) -> float:
    """Return the median seconds of up to `TIMED_STEPS` steps.

    Args:
        replica: the run, after its first step.
        timed_s: seconds after which no further step is timed.
    """
    seconds: list[float] = []  # a median: other work on the machine can slow a single step
    while len(seconds) < TIMED_STEPS and (not seconds or sum(seconds) < timed_s):
        started = time.perf_counter()
        replica.train_step(2 + len(seconds))
        seconds.append(time.perf_counter() - started)
    return median(seconds)
