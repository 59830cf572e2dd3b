"""RAdam (Liu et al. 2020), from torch."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters


class RAdam(AbstractOptimizer):
    """Adam with steps rectified while the mean squared gradient covers few steps.

    Liu et al. 2020, Algorithm 2; ``torch.optim.RAdam``. The first steps, five at β₂ = 0.999, follow the mean gradient
    itself.
    """

    update_family = "adam"
    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(
            default=1e-8, gt=0, description="added to the root of the mean squared gradient, before its bias correction"
        )

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return torch.optim.RAdam(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            decoupled_weight_decay=True,
        )


EXPORT = RAdam
