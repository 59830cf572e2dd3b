"""Say how many trials run side by side, and what of the machine each of them holds."""

from __future__ import annotations

import os

from stability.config.sweep import SweepSpec


def cpus_per_trial(spec: SweepSpec) -> float:
    """Return what a trial holds of the cores: what the spec says, else one for each of its threads on each of its
    devices."""
    return spec.cpus_per_trial if spec.cpus_per_trial is not None else float(spec.threads * spec.devices_per_trial)


def gpus_per_trial(spec: SweepSpec) -> float:
    """Return the share of a GPU that a trial holds: what the spec says; where that is auto, which is measured when the
    trials start, a whole one a device."""
    if spec.gpus_per_trial != "auto":
        return spec.gpus_per_trial
    return float(spec.devices_per_trial) if spec.device != "cpu" and _num_gpus() else 0.0


def slots(spec: SweepSpec) -> int:
    """Return how many trials run at a time: on this machine, or as jobs."""
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
