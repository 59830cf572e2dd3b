"""Guards against non-finite steps and large gradients. No torch.

Source: *Frankenstein Transformer*, Algorithm 1, lines 5 to 12. The loop continues with the next step and batch, as in
the paper: the failed ones would fail again. Step numbers, data order and learning rates stay equal to those of every
other run. (In the paper the schedule waits for a skipped step; here the step number gives the rate.) "skip" omits the
optimizer's step. "restore" returns to the parameters and optimizer state of the last good checkpoint, or to the
initialisation if none exists; progress since then is lost. The whole run has one budget; once it is spent, the run ends
as diverged, as without guards.

A checkpoint is good only after the next step has succeeded: its own step's loss was computed with those before it.
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
    """The guards of one run and their counts so far."""

    spec: GuardSpec
    skipped_steps: int = 0
    restores: int = 0
    good: list[int] = field(default_factory=list)  # steps of good checkpoints, rising
    # steps of checkpoints of the current state, before any sound step was taken from it
    untried: list[int] = field(default_factory=list)

    def explain_large_norm(self, row: dict[str, Any]) -> str | None:
        """Return a reason if the gradient after clipping exceeds the threshold, else None."""
        limit, norm = self.spec.post_clip_norm, row.get("clipped_norm")
        if limit is None or norm is None or norm <= limit:
            return None
        return (
            f"gradient norm after clipping is {norm:.4g} at step {row['step']}, above guards.post_clip_norm={limit:g}"
        )

    def answer(self, *, has_moved: bool) -> Answer:
        """Decide how to treat a bad step, and count it against the budget.

        Args:
            has_moved: the step already changed the parameters, so it cannot be skipped.
        """
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

    def explain_end(self, reason: str) -> str:
        """Return the reason of a divergence, with the reason why no guard prevented it."""
        if self.spec.on_nonfinite == "stop":
            return reason
        if self.skipped_steps + self.restores < self.spec.retries:
            return (
                f"{reason}; the step was taken and cannot be skipped (guards.on_nonfinite=restore_last_good could "
                "undo it)"
            )
        return (
            f"{reason}; guards.retries={self.spec.retries} {'skipped steps' if self.skipped_steps else 'restores'} "
            "are spent"
        )

    def sound_step(self) -> None:
        if self.untried:
            self.good, self.untried = sorted({*self.good, *self.untried}), []

    def record_checkpoint(self, step: int, kept: Collection[int]) -> None:
        """Record a checkpoint of the current state.

        Args:
            step: its step.
            kept: steps of the checkpoints kept beside it.
        """
        self.good = [each for each in self.good if each in kept]
        self.untried.append(step)

    def candidates(self) -> list[int]:
        """Return the checkpoints to restore from, newest first.

        Untried checkpoints are dropped, even if they were good before: the very next step failed.
        """
        self.good = [step for step in self.good if step not in self.untried]
        return self.good[::-1]

    def record_restore(self, step: int) -> None:
        """Record a restore to the checkpoint of this step, or to the initialisation (0)."""
        self.untried = [step] if step else []

    def counts(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "restores": self.restores}

    def state(self) -> dict[str, Any]:
        return self.counts() | {"good": list(self.good), "untried": list(self.untried)}

    def resume(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def first_non_finite(values: dict[str, Any], step: int) -> str | None:
    """Return ``"loss is nan at step 37"`` for the first non-finite value, else None."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value} at step {step}"
    return None
