"""What became of a run: stable, spiked, plateaued or diverged. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stability.config import VerdictSpec


@dataclass
class SpikeWatch:
    """Follows the smoothed training loss: an exponential mean over about ``smoothing_steps`` steps, its running minimum, its largest rise above it."""

    spec: VerdictSpec
    smoothed: float | None = None
    lowest: float = float("inf")
    worst_rise: float = 0.0
    worst_step: int = 0
    last_rise: float = 0.0

    def update(self, step: int, loss: float) -> None:
        rate = 1 / self.spec.smoothing_steps
        self.smoothed = loss if self.smoothed is None else (1 - rate) * self.smoothed + rate * loss
        self.lowest = min(self.lowest, self.smoothed)
        self.last_rise = self.smoothed - self.lowest
        if self.last_rise > self.worst_rise:
            self.worst_rise, self.worst_step = self.last_rise, step

    def state(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("smoothed", "lowest", "worst_rise", "worst_step", "last_rise")}

    def restore(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)


def judge(val_nll: float, init_nll: float, unigram_nll: float, watch: SpikeWatch) -> tuple[str, str]:
    """(verdict, reason) of a run that reached its last step with finite numbers.

    ``plateaued``: it learned nothing beyond token frequencies; ``spiked``: its smoothed loss rose by more than the margin, whether or not it came
    back by the end (the reason says which); ``stable``: neither.
    """
    if not val_nll < min(init_nll, unigram_nll):
        return "plateaued", f"final validation NLL {val_nll:.3f} is not below min(initial {init_nll:.3f}, unigram {unigram_nll:.3f})"
    if watch.worst_rise > watch.spec.spike_nats:
        came_back = "and came back" if watch.last_rise <= watch.spec.spike_nats else "and had not come back at the end"
        return "spiked", f"smoothed loss rose {watch.worst_rise:.2f} nats above its minimum by step {watch.worst_step} {came_back}"
    return "stable", ""
