"""ADOPT (Taniguchi et al. 2024), from pytorch_optimizer."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._library import library_class


class Adopt(AbstractOptimizer):
    """Adam that divides each gradient by the root of the mean square of those before it, clips the ratio, and only then
    takes its mean (Taniguchi et al. 2024, Algorithm 2). The first gradient sets the mean square and moves nothing."""

    elementwise = True
    first_step_zero = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean normalised gradient")
        beta2: float = Field(default=0.9999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-6, gt=0, description="least root of the mean squared gradient")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return library_class("ADOPT")(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2),
            clip_lambda=clip,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            weight_decouple=True,
        )


def clip(step: int) -> float:
    """Return the largest ratio of a gradient to the root of the mean square before it, t^¼. ``step``: t + 1, since the
    library counts the step that moves nothing."""
    return (step - 1) ** 0.25


EXPORT = Adopt
