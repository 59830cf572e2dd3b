"""ADOPT (Taniguchi et al. 2024)."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import ByHand, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class NormalisedFirst(ByHand):
    """Steps along the mean of normalised gradients.

    Each gradient is divided by the root of the mean square before it.
    """

    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Perform one step of Algorithm 2.

        Step t = 0 only sets the mean square, apart from weight decay.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        means, squares = self.get_state(params, "exp_avg"), self.get_state(params, "exp_avg_sq")
        num_before = group["step"] - 1
        if not num_before:
            torch._foreach_addcmul_(squares, gradients, gradients)
            return
        roots = torch._foreach_sqrt(squares)
        torch._foreach_clamp_min_(roots, group["epsilon"])
        ratios, limit = torch._foreach_div(gradients, roots), num_before**0.25
        torch._foreach_clamp_min_(ratios, -limit)
        torch._foreach_clamp_max_(ratios, limit)
        torch._foreach_lerp_(means, ratios, 1 - group["beta1"])
        torch._foreach_add_(params, means, alpha=-group["lr"])
        torch._foreach_mul_(squares, group["beta2"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["beta2"])


class Adopt(AbstractOptimizer):
    """Adam with gradients normalised and clipped before their mean (Taniguchi et al. 2024, Algorithm 2).

    Each gradient is divided by the root of the mean square of earlier gradients. Step t clips the ratio to t^¼. The
    gradient of step 0 sets the mean square and moves nothing.
    """

    stepper = NormalisedFirst
    update_family = "adam"
    elementwise = True
    first_step_zero = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean normalised gradient")
        beta2: float = Field(default=0.9999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-6, gt=0, description="least root of the mean squared gradient")


EXPORT = Adopt
