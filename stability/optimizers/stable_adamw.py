"""StableAdamW (Wortsman et al. 2023): AdamW with update clipping."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import BaseAdamW, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class ClippedUpdates(BaseAdamW):
    """AdamW with a smaller rate for each tensor whose squared gradient outruns its mean."""

    def move(self, group: Group, params: Tensors, gradients: Tensors, directions: Tensors) -> None:
        corrected = torch._foreach_div(self.get_state(params, "exp_avg_sq"), 1 - group["beta2"] ** group["step"])
        for param, gradient, square, direction in zip(params, gradients, corrected, directions, strict=True):
            rms = (gradient.square() / square.clamp_min(group["epsilon"] ** 2)).mean().sqrt()
            step = direction.add_(param, alpha=group["weight_decay"]) / rms.clamp_min(1)
            param.add_(step, alpha=-group["lr"])


class StableAdamW(AbstractOptimizer):
    """AdamW whose rate, weight decay's included, is α / max(1, RMS) for each tensor.

    RMS = √mean(g² / max(v̂, ε²)) (Wortsman et al. 2023, arXiv:2304.13013, Algorithm 2): above 1 the mean squared
    gradient lags behind. α_max uses the step as it is, RMS included.
    """

    stepper = ClippedUpdates
    update_family = "adam"

    class Config(Settings):
        weight_decay: float = Field(default=1e-2, ge=0, description="decoupled weight decay, times the tensor's rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(
            default=1e-8, gt=0, description="added to the root of the mean squared gradient; least root in the RMS"
        )


EXPORT = StableAdamW
