"""LAMB (You et al. 2020)."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import BaseAdamW, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class TrustRatio(BaseAdamW):
    """Adam with each tensor's step scaled to the tensor's norm, times the learning rate."""

    def move(self, group: Group, params: Tensors, gradients: Tensors, directions: Tensors) -> None:
        torch._foreach_add_(directions, params, alpha=group["weight_decay"])
        norms = zip(torch._foreach_norm(params), torch._foreach_norm(directions), strict=True)
        ratios = [torch.where((own > 0) & (step > 0), own / step, torch.ones_like(own)) for own, step in norms]
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(params, directions, alpha=-group["lr"])


class Lamb(AbstractOptimizer):
    """AdamW with its direction r, weight decay included, scaled to the tensor's norm.

    θ ← θ − α ‖θ‖/‖r‖ r (You et al. 2020, Algorithm 2 with φ(z) = z). The learning rate is the relative step of each
    tensor. A zero tensor moves by the unscaled step, as in the authors' code.
    """

    stepper = TrustRatio
    lr_reference = 1e-2

    class Config(Settings):
        weight_decay: float = Field(
            default=0.0, ge=0, description="weight decay, added to Adam's direction before it is scaled"
        )
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-6, gt=0, description="added to the root of the mean squared gradient")


EXPORT = Lamb
