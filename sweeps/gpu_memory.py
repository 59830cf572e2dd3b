"""Measure how many trials fit on a GPU.

One trial of each kind runs briefly in a process of its own. The largest peak memory decides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stability.runs.leftovers import name_temporary, remove
from sweeps.trial import RunTrial, Trial, run_trial

MARGIN = 1.15  # factor over the measured peak: batches differ in their masks, and allocators fragment
CONTEXT_MB = 800.0  # CUDA context and library code of a process, not counted by PyTorch's allocator
PROBE_STEPS, PROBE_LR = 2, 1e-6  # the second step includes the optimizer's state; the rate is too small to diverge


@dataclass(frozen=True)
class Peak:
    """The largest peak memory over the kinds of runs.

    Attributes:
        label: label of the largest trial.
        largest_mb: its peak in MiB; infinite if a whole GPU was not enough.
        free_mb: the GPU's free memory in MiB.
    """

    label: str
    largest_mb: float
    free_mb: float

    @property
    def num_fitting(self) -> int:
        """Number of trials per GPU, at least one."""
        return max(1, int(self.free_mb // (MARGIN * self.largest_mb + CONTEXT_MB)))

    @property
    def share(self) -> float:
        """Share of a GPU per trial, so that `num_fitting` trials fit.

        It is rounded down to Ray's steps of 1e-4.
        """
        return int(1e4 / self.num_fitting) / 1e4

    def describe(self) -> str:
        if self.largest_mb == float("inf"):
            return f"{self.label} needs more than the {self.free_mb / 1024:.1f} GiB of a GPU: one trial a GPU"
        taken = f"at most {self.largest_mb / 1024:.2f} GiB ({self.label}) of a GPU's {self.free_mb / 1024:.1f} GiB"
        return (
            f"measured: {taken}; with {MARGIN - 1:.0%} and {CONTEXT_MB:.0f} MiB a process to spare, "
            f"{self.num_fitting} trials a GPU"
        )


def probe(trials: Sequence[Trial], run: RunTrial = run_trial, device: Any = None) -> Peak:
    """Run the beginning of one trial per kind, and return the largest peak memory.

    Call it in a separate process: its CUDA context stays until the process ends.

    Args:
        trials: the trials of a launch.
        run: runs one trial; replaced in tests.
        device: replaces the first GPU in tests.
    """
    device = device or _Cuda()
    free_mb, label, largest_mb = device.free_mb(), "no trial", 0.0
    for trial in kinds(trials).values():
        device.forget()
        mb = _peak_mb(trial, run, device.peak_mb)
        if mb > largest_mb:
            label, largest_mb = trial.label, mb
    return Peak(label, largest_mb, free_mb)


def kinds(trials: Sequence[Trial]) -> dict[str, Trial]:
    """Return one trial per kind of run, keyed by its recipe; learning rate and seed do not count."""
    found: dict[str, Trial] = {}
    for trial in trials:
        found.setdefault(json.dumps({**trial.spec, "lr_peak": None, "seed": None}, sort_keys=True), trial)
    return found


def _peak_mb(trial: Trial, run: RunTrial, peak_mb: Callable[[], float]) -> float:
    """Return the peak memory of a trial's beginning in MiB; infinite if it ran out of memory.

    Other failures are ignored here: the trial itself will fail and report them.
    """
    # a temporary name, so that the next launch removes the folder if this process is killed
    folder = name_temporary(Path(trial.pool) / "probe")
    folder.mkdir()
    try:
        (folder / "cache").symlink_to(Path(trial.pool).resolve() / "cache")
        begun = shorten_trial(trial, str(folder))
        for _ in run(begun):
            pass
        status = begun.directory.status()
    finally:
        remove(folder)
    out_of_memory = status["state"] == "failed" and "OutOfMemory" in status["reason"]
    return float("inf") if out_of_memory else peak_mb()


def shorten_trial(trial: Trial, pool: str) -> Trial:
    """Shorten a trial to the parts relevant for its memory.

    They are two steps, a validation, a checkpoint, one recorded step of α_max and of each table, and one batch of
    samples.
    """
    spec = trial.spec
    cut = {
        "steps": PROBE_STEPS,
        "lr_peak": PROBE_LR,
        "schedule": {**spec["schedule"], "warmup_steps": 0},
        "evaluation": {**spec["evaluation"], "every_steps": PROBE_STEPS},
        "checkpoint": {"every_steps": 0},
    }
    curvature = (
        None
        if trial.curvature is None
        else {**trial.curvature, "phase": "terminal", "warmup_batches": 1, "warmup_steps": 0, "recorded_steps": 1}
    )
    generate = (
        None
        if trial.generate is None
        else {**trial.generate, "num": min(trial.generate["num"], trial.generate["batch"])}
    )
    return replace(
        trial, run_id="probe", pool=pool, spec={**spec, **cut}, curvature=curvature, generate=generate, sinks=None
    )


class _Cuda:
    """The first visible GPU; memory in MiB."""

    def free_mb(self) -> float:
        import torch

        # CONTEXT_MB counts this process's own context with each trial
        return torch.cuda.mem_get_info()[0] / 2**20 + CONTEXT_MB

    def peak_mb(self) -> float:
        import torch

        return torch.cuda.max_memory_reserved() / 2**20

    def forget(self) -> None:
        release()


def release() -> None:
    """Free an ended trial's cached GPU memory, and reset the peak counter."""
    import gc

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
