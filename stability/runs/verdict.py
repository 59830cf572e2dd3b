"""Verdict of a run: stable, spiked, plateaued or diverged. No torch; reports import it.

Diverged means a non-finite number or a gradient above ``guards.post_clip_norm``. Reports find the step at which a run
began to break by the same `SpikeWatch`, on the logged losses (`analysis.numbers.early_measurements`), and read a
spike's top out of its reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class SpikeRule(NamedTuple):
    """The settings of `stability.config.training.VerdictSpec`, with its defaults, of a study's record."""

    smoothing_steps: int = 20
    spike_nats: float = 0.5
    noise_margin: float = 8.0


@dataclass
class SpikeWatch:
    """The smoothed training loss, its running minimum, and its largest rise above it.

    The smoothing is an exponential mean over about ``smoothing_steps`` steps. `noise` is the batch noise left in it.
    The variance of the loss is a sixth of the mean square of its second differences, almost unaffected by a falling
    loss (after von Neumann 1941); the exponential mean retains a known share of that variance. The noise is measured at
    the running minimum: a rise is noisy itself, and would raise its own margin. Ordinary training stays within about 6
    standard deviations (measured: at most 4.5 to 6.0 in 11 runs of 900 to 3,000 steps by cross entropy and by score
    entropy, with losses that scatter by 0.1 and by 0.7 nats). ``spec``: a VerdictSpec or `SpikeRule`.
    """

    spec: Any
    smoothed: float | None = None
    lowest: float = float("inf")
    lowest_variance: float = 0.0
    kept_share: float = 1.0
    worst_rise: float = 0.0
    worst_step: int = 0
    last_rise: float = 0.0
    margin: float = field(init=False)
    previous: float | None = None
    variance: float = 0.0
    difference: float | None = None
    num_losses: int = 0

    def __post_init__(self) -> None:
        self.margin = self.spec.spike_nats

    def update(self, step: int, loss: float) -> None:
        """Add a step's loss to the smoothed loss and its worst rise.

        Only a rise beyond the margin counts.

        Args:
            step: number of the step.
            loss: its loss in nats.
        """
        rate = 1 / self.spec.smoothing_steps
        self._follow_noise(loss, rate)
        smoothed = loss if self.smoothed is None else (1 - rate) * self.smoothed + rate * loss
        self.smoothed = smoothed
        if smoothed < self.lowest:
            # share of the losses' variance in an exponential mean: from 1 at first to ρ/(2 − ρ)
            first = (1 - rate) ** (2 * self.num_losses)
            self.lowest, self.kept_share = smoothed, first + (1 - first) * rate / (2 - rate)
            self.lowest_variance = self.variance
        self.num_losses += 1
        if self.num_losses <= self.spec.smoothing_steps:  # too few for a reliable variance: use the latest
            self.lowest_variance = self.variance
        self.last_rise = smoothed - self.lowest
        margin = max(self.spec.spike_nats, self.spec.noise_margin * self.noise)
        if self.last_rise - margin > self.worst_rise - self.margin:
            self.worst_rise, self.worst_step, self.margin = self.last_rise, step, margin

    def _follow_noise(self, loss: float, rate: float) -> None:
        """Estimate the losses' variance: first a plain mean, then exponential over about ten times the smoothing."""
        difference = None if self.previous is None else loss - self.previous
        if difference is not None and self.difference is not None:  # from the third loss on (num_losses = 2)
            weight = max(rate / 10, 1 / (self.num_losses - 1))
            self.variance = (1 - weight) * self.variance + weight * (difference - self.difference) ** 2 / 6
        self.previous, self.difference = loss, difference

    @property
    def noise(self) -> float:
        """Standard deviation of the smoothed loss at its running minimum, in nats."""
        return math.sqrt(self.lowest_variance * self.kept_share)

    @property
    def spiked(self) -> bool:
        return self.worst_rise > self.margin

    def state(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "spec"}

    def resume(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)


def judge(
    val_nll: float, init_nll: float, unigram_nll: float, watch: SpikeWatch, baseline: str = "token frequencies"
) -> tuple[str, str]:
    """Return (verdict, reason) of a run that reached its last step with finite numbers.

    ``plateaued``: no better than token (or class) frequencies or the untrained model. ``spiked``: the smoothed loss
    rose by more than the margin, even if it recovered (the reason says so). ``stable``: neither.

    Args:
        val_nll: final validation NLL in nats.
        init_nll: that of the untrained model.
        unigram_nll: that of the baseline.
        watch: the smoothed loss; its margin is the spec's or follows from the batch noise.
        baseline: name of the baseline for the reason.
    """
    if not val_nll < min(init_nll, unigram_nll):
        return (
            "plateaued",
            f"final validation NLL {val_nll:.3f} is not below min(initial {init_nll:.3f}, {baseline} "
            f"{unigram_nll:.3f})",
        )
    if watch.spiked:
        came_back = "and came back" if watch.last_rise <= watch.margin else "and had not come back at the end"
        return (
            "spiked",
            f"smoothed loss rose {watch.worst_rise:.2f} nats above its minimum by step {watch.worst_step} {came_back}",
        )
    return "stable", ""
