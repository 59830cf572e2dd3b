"""Return how many trials run at once, and their share of cores and GPUs."""

from __future__ import annotations

import os

from stability.config.sweep import SweepSpec


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
