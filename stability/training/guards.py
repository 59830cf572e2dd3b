"""Answer a step that is not finite or whose gradient is too large: *Frankenstein Transformer*, Algorithm 1, lines 5 to
12. No torch.

As there, the loop goes on with the next step and the next batch: those that failed would fail again, and step numbers,
data order and learning rates stay what they are for every run beside this one. (There the schedule waits for a step
that was left out; here a step's number gives its rate.) What is skipped is the optimizer's step; what is restored are
the parameters and the optimizer's state of the last good checkpoint, the initialisation before there is one, and what
was learned since is lost. One budget serves the whole run; once it is spent the run ends as diverged, as it does
without guards.

A checkpoint is good once a sound step was taken from what it holds: its own step's loss was that of the parameters
before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from stability.config.training import GuardSpec

Answer = Literal["stop", "skip", "restore"]


@dataclass
class Guard:
    """The guards of one run, and what they did so far."""

    spec: GuardSpec
    skipped_steps: int = 0
    restores: int = 0
    good: list[int] = field(default_factory=list)  # steps of checkpoints to go back to, rising
    # of those that hold what the run stands at, from which no sound step was taken yet
    untried: list[int] = field(default_factory=list)

    def too_large(self, row: dict[str, Any]) -> str | None:
        """Say what is wrong with a step whose gradient, once clipped, is above the threshold; else None."""
        limit, norm = self.spec.post_clip_norm, row.get("clipped_norm")
        if limit is None or norm is None or norm <= limit:
            return None
        return (
            f"gradient norm after clipping is {norm:.4g} at step {row['step']}, above guards.post_clip_norm={limit:g}"
        )

    def answer(self, *, has_moved: bool) -> Answer:
        """Say what to do with a bad step, counted against the budget. ``has_moved``: the parameters are no longer those
        before it, too late to skip it."""
        mode = self.spec.on_nonfinite
        if (
            mode == "stop"
            or self.skipped_steps + self.restores >= self.spec.retries
            or (mode == "skip_step" and has_moved)
        ):
            return "stop"
        if mode == "skip_step":
            self.skipped_steps += 1
            return "skip"
        self.restores += 1
        return "restore"

    def account(self, reason: str) -> str:
        """Return the reason of a divergence, and why the guards did not prevent it."""
        if self.spec.on_nonfinite == "stop":
            return reason
        if self.skipped_steps + self.restores < self.spec.retries:
            return (
                f"{reason}; the step was taken and cannot be skipped (guards.on_nonfinite=restore_last_good could "
                "take it back)"
            )
        return (
            f"{reason}; guards.retries={self.spec.retries} {'skipped steps' if self.skipped_steps else 'restores'} "
            "are spent"
        )

    def sound_step(self) -> None:
        if self.untried:
            self.good, self.untried = sorted({*self.good, *self.untried}), []

    def written(self, step: int, kept: Collection[int]) -> None:
        """Note a checkpoint of what the run stands at; ``kept``: those that stay beside it."""
        self.good = [each for each in self.good if each in kept]
        self.untried.append(step)

    def candidates(self) -> list[int]:
        """Return the checkpoints to go back to, newest first. What the run stood at failed at once, even if it had held
        before."""
        self.good = [step for step in self.good if step not in self.untried]
        return self.good[::-1]

    def restored(self, step: int) -> None:
        """Note that the run is back at a checkpoint, or (0) at the initialisation."""
        self.untried = [step] if step else []

    def counts(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "restores": self.restores}

    def state(self) -> dict[str, Any]:
        return self.counts() | {"good": list(self.good), "untried": list(self.untried)}

    def resume(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def first_non_finite(values: dict[str, Any], step: int) -> str | None:
    """Return ``"loss is nan at step 37"`` for the first value that is not finite, else None."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value} at step {step}"
    return None
