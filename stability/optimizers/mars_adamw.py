"""MARS-AdamW (Yuan et al. 2024)."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import BaseAdamW, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class VarianceReduced(BaseAdamW):
    """AdamW on the corrected gradient c = g + γ β₁/(1 − β₁) (g − g₋₁).

    c is divided by its norm if above 1.
    """

    def correct_gradients(self, group: Group, params: Tensors, gradients: Tensors) -> Tensors:
        before = self.get_state(params, "last_gradient")
        corrected = torch._foreach_sub(gradients, before)
        torch._foreach_mul_(corrected, group["gamma"] * group["beta1"] / (1 - group["beta1"]))
        torch._foreach_add_(corrected, gradients)
        torch._foreach_div_(corrected, [norm.clamp_(min=1.0) for norm in torch._foreach_norm(corrected)])
        torch._foreach_copy_(before, gradients)
        return list(corrected)


class MarsAdamW(AbstractOptimizer):
    """AdamW on variance-reduced gradients (Yuan et al. 2024, Algorithm 2).

    The previous batch's gradient replaces the paper's second gradient on the same batch. At the first step it is 0, as
    in the authors' code. Each tensor's corrected gradient is scaled to a norm of at most 1. Vectors use the same steps
    as matrices, at the run's rate.
    """

    stepper = VarianceReduced
    update_family = "adam"
    lr_reference = 3e-3

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.95, ge=0, lt=1, description="decay of the mean corrected gradient")
        beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of its mean square")
        gamma: float = Field(default=0.025, ge=0, description="weight of the correction, times beta1 / (1 − beta1)")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean square")


EXPORT = MarsAdamW
