"""Refuse a sweep that its launcher cannot run, before any of it is on record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stability.config.sweep import SweepSpec
from stability.runs.sinks import SINKS
from sweeps.slots import cpus_per_trial, gpus_per_trial
from sweeps.trial import Trial


def require(spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Raise a ``RuntimeError`` or ``ValueError`` where the launcher cannot run ``trials``: what it stands on is not
    installed or does not answer, this machine has no room for a trial, or not what the trials compute with."""
    if spec.launcher == "ray":
        from sweeps.launchers.ray import launcher as ray_launcher
        from sweeps.launchers.ray.share import Share

        ray_launcher.require(Share(cpus_per_trial(spec), gpus_per_trial(spec)), spec.ray.address)
    if spec.launcher == "slurm":
        from sweeps.launchers.slurm import launcher as slurm_launcher

        slurm_launcher.require(spec.slurm)
    for name in spec.sinks:
        SINKS[name].require()
    if runs_here(spec):
        _require_of_this_machine(spec.device, trials)


def require_for_plan(spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Raise a ``ValueError`` of one line where the trials are to run on this machine and ask for kernels that cannot:
    a plan could not time them."""
    from stability.build import resolve_device

    if runs_here(spec):
        _require_kernels(trials, resolve_device(spec.device))


def _require_kernels(trials: Sequence[Trial], device: Any) -> None:
    from stability.config.parse import computed_parts_of
    from stability.training.machine import require_kernels

    for trial in trials:
        require_kernels(computed_parts_of(trial.spec), device)


def runs_here(spec: SweepSpec) -> bool:
    """Return whether all trials run on this machine. Of other nodes it is not known what they have."""
    return {
        "serial": True,
        "slurm": spec.slurm.executor == "local",
        "ray": spec.ray.address is None,
    }[spec.launcher]


def _require_of_this_machine(name: str, trials: Sequence[Trial]) -> None:
    """Raise an error where a device of this name, or the precision, the kernels or the compiler of one of the trials,
    is not to be had here."""
    from stability.build import resolve_device
    from stability.models.precision import require_precision
    from stability.training.machine import require_compiler

    device = resolve_device(name)
    for precision in {trial.spec.get("precision", "float32") for trial in trials}:  # older than the field: float32
        require_precision(precision, device)
    _require_kernels(trials, device)
    if any(trial.spec.get("compile", False) for trial in trials):
        require_compiler()
