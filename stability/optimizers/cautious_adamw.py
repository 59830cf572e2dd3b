"""Cautious AdamW (Liang et al. 2024)."""

from __future__ import annotations

from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import BaseAdamW, Group, Tensors
from stability.optimizers._base import AbstractOptimizer

SMALLEST_SHARE = 1e-3  # lower bound of the divisor, the share of moving entries


class Cautious(BaseAdamW):
    """AdamW without the entries that would step against their gradient."""

    def move(self, group: Group, params: Tensors, gradients: Tensors, directions: Tensors) -> None:
        for direction, gradient in zip(directions, gradients, strict=True):
            kept = (direction * gradient > 0).to(direction.dtype)
            direction.mul_(kept.div_(kept.mean().clamp_(min=SMALLEST_SHARE)))
        super().move(group, params, gradients, directions)


class CautiousAdamW(AbstractOptimizer):
    """AdamW that skips entries with different signs in step and gradient.

    The other entries' steps are divided by their share of the tensor's entries (Liang et al. 2024, Algorithm 1 around
    AdamW). The share is at least 1e-3, as in the authors' code.
    """

    stepper = Cautious
    update_family = "adam"

    class Config(Settings):
        weight_decay: float = Field(default=1e-2, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")


EXPORT = CautiousAdamW
