"""Choose a sweep's launcher, refuse a sweep that it cannot run, and count the trials that run at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

from stability.config.launchers import RaySpec
from stability.config.sweep import SweepSpec
from stability.runs.log import load_sink
from sweeps.trial import Trial, is_done


def resolve_launcher(spec: SweepSpec, trials: Sequence[Trial]) -> SweepSpec:
    """Return the spec with ``auto`` replaced: serial if one run of a grid is missing, on a CPU, else ray.

    A search adds runs later, so it chooses ray. So do settings of Ray's, and more threads than this machine has cores,
    which ray refuses.
    """
    if spec.launcher != "auto":
        return spec
    is_set = spec.ray != RaySpec() or spec.cpus_per_trial is not None or spec.gpus_per_trial != "auto"
    is_grid = spec.search is None and spec.lr.edge is None
    fits_cpu = not gpus_per_trial(spec) and cpus_per_trial(spec) <= (os.cpu_count() or 1)
    missing = (trial for trial in trials if not is_done(trial))
    is_serial = is_grid and fits_cpu and not is_set and len(list(islice(missing, 2))) < 2
    return spec.model_copy(update={"launcher": "serial" if is_serial else "ray"})


def require(spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Raise an error if the launcher cannot run ``trials``.

    Raises:
        RuntimeError: a package, service or device is missing or does not answer, or this machine has too few resources
            for a trial.
        ValueError: this machine cannot run a trial's precision, kernels or compiler.
    """
    if spec.launcher == "ray":
        from sweeps.launchers.ray import launcher as ray_launcher
        from sweeps.launchers.ray.share import Share

        ray_launcher.require(Share(cpus_per_trial(spec), gpus_per_trial(spec)), spec.ray.address)
    if spec.launcher == "slurm":
        from sweeps.launchers.slurm import launcher as slurm_launcher

        slurm_launcher.require(spec.slurm)
    for name in spec.sinks:
        load_sink(name).require()
    if runs_here(spec):
        _require_hardware(spec.device, trials)


def require_for_plan(spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Raise a one-line ``ValueError`` if this machine lacks the trials' kernels.

    A plan could not time such trials. Trials for other machines are not checked.
    """
    from stability.build import resolve_device

    if runs_here(spec):
        _require_kernels(trials, resolve_device(spec.device))


def _require_kernels(trials: Sequence[Trial], device: Any) -> None:
    from stability.config.parse import computed_parts_of
    from stability.training.machine import require_kernels

    for trial in trials:
        require_kernels(computed_parts_of(trial.spec), device)


def runs_here(spec: SweepSpec) -> bool:
    """Return whether all trials run on this machine; other nodes' hardware is unknown."""
    return {
        "serial": True,
        "slurm": spec.slurm.executor == "local",
    }.get(spec.launcher, spec.ray.address is None)


def _require_hardware(name: str, trials: Sequence[Trial]) -> None:
    """Raise an error if this machine lacks a device, precision, kernel, CUDA graphs or compiler."""
    from stability.build import resolve_device
    from stability.models.passes import require_precision
    from stability.training.captured import require_graphs
    from stability.training.machine import require_compiler

    device = resolve_device(name)
    for precision in {trial.spec.get("precision", "float32") for trial in trials}:  # specs without the field: float32
        require_precision(precision, device)
    _require_kernels(trials, device)
    if any(trial.spec.get("cuda_graphs", False) for trial in trials):
        require_graphs(device)
    if any(trial.spec.get("compile", False) for trial in trials):
        require_compiler()


def cpus_per_trial(spec: SweepSpec) -> float:
    """Return the cores per trial: the spec's number, else one per thread and device."""
    return spec.cpus_per_trial if spec.cpus_per_trial is not None else float(spec.threads * spec.devices_per_trial)


def gpus_per_trial(spec: SweepSpec) -> float:
    """Return the GPUs per trial: the spec's number, or whole GPUs if it is auto.

    The launcher replaces the value for auto by a measured share when the trials start.
    """
    if spec.gpus_per_trial != "auto":
        return spec.gpus_per_trial
    return float(spec.devices_per_trial) if spec.device != "cpu" and _num_gpus() else 0.0


def slots(spec: SweepSpec) -> int:
    """Return the number of concurrent trials, on this machine or as jobs."""
    if spec.launcher == "serial":
        return 1
    if spec.launcher == "slurm":
        from sweeps.launchers.slurm.launcher import most_at_once

        return most_at_once(spec.slurm, spec.threads * spec.devices_per_trial)
    from sweeps.launchers.ray.share import Share

    return max(
        1, Share(cpus_per_trial(spec), gpus_per_trial(spec)).fits({"CPU": os.cpu_count() or 1, "GPU": _num_gpus()})
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
