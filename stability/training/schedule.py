"""Learning rate over the steps. No torch."""

from __future__ import annotations

import math

from stability.config.training import ScheduleSpec


def lr_factor(schedule: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the learning rate of the ``step``-th update (counted from 1) over its peak; always positive."""
    if step <= schedule.warmup_steps:
        return step / (schedule.warmup_steps + 1)
    progress = (step - 1 - schedule.warmup_steps) / max(1, num_steps - schedule.warmup_steps)
    floor = schedule.final_ratio
    if schedule.name == "linear":
        return floor + (1 - floor) * (1 - progress)
    if schedule.name == "cosine":
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0
