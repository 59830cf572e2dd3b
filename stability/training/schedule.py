"""Learning rate over the steps. No torch."""

from __future__ import annotations

import math

from stability.config.training import ScheduleSpec


def lr_factor(schedule: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the learning rate of an update over its peak; always positive.

    ``wsd`` (warm-up, stable, decay) stays at the peak until the last `ScheduleSpec.decay_steps`, then falls linearly
    (Hu et al. 2024, arXiv:2404.06395, section 4; linear: Hägele et al. 2024, arXiv:2405.18392).

    Args:
        schedule: form of the schedule.
        step: number of the update, from 1.
        num_steps: number of updates of the run.
    """
    schedule = schedule.settle(num_steps)
    if step <= schedule.warmup_steps:
        return step / (schedule.warmup_steps + 1)
    kept = num_steps - schedule.decay_steps(num_steps) if schedule.name == "wsd" else schedule.warmup_steps
    progress = max(0, step - 1 - kept) / max(1, num_steps - kept)
    floor = schedule.final_ratio
    if schedule.name in ("linear", "wsd"):
        return floor + (1 - floor) * (1 - progress)
    if schedule.name == "cosine":
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0
