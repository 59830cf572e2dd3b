"""Adan (Xie et al. 2022)."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import ByHand, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class NesterovMoments(ByHand):
    """Steps along means of gradients and gradient differences.

    They are divided by the root of their joint mean square.
    """

    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Perform Algorithm 1 of the paper, with bias-corrected means.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        beta1, beta2, beta3, step = group["beta1"], group["beta2"], group["beta3"], group["step"]
        keys = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "last_gradient")
        means, differences, squares, before = (self.get_state(params, key) for key in keys)
        changes = torch._foreach_sub(gradients, gradients if step == 1 else before)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_lerp_(differences, changes, 1 - beta2)
        ahead = torch._foreach_add(gradients, changes, alpha=beta2)
        torch._foreach_mul_(squares, beta3)
        torch._foreach_addcmul_(squares, ahead, ahead, 1 - beta3)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta3**step) ** 0.5)
        torch._foreach_add_(roots, group["epsilon"])
        directions = torch._foreach_div(means, 1 - beta1**step)
        torch._foreach_add_(directions, differences, alpha=beta2 / (1 - beta2**step))
        torch._foreach_div_(directions, roots)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-group["lr"])
        for last, gradient in zip(before, gradients, strict=True):
            last.copy_(gradient)  # `_foreach_copy_` does not support tensors sharded over devices


class Adan(AbstractOptimizer):
    """Adam with Nesterov momentum from gradient differences (Xie et al. 2022, Algorithm 1).

    The bias corrections are from the authors' code. Each β is the decay of a mean, the paper's 1 − β. Weight decay is
    decoupled as in AdamW, unlike the paper's division by 1 + λα.
    """

    stepper = NesterovMoments
    update_family = "adam"
    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.98, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.92, ge=0, lt=1, description="decay of the mean difference of two gradients")
        beta3: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean squared Nesterov gradient")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")


EXPORT = Adan
