"""Adan (Xie et al. 2022), from pytorch_optimizer."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._library import library_class


class Adan(AbstractOptimizer):
    """Adam with Nesterov's momentum by differences of gradients (Xie et al. 2022, Algorithm 1), with the bias
    corrections of its authors' code. Each β is the decay of a mean, the paper's 1 − β. Weight decay is decoupled as
    AdamW's, and not the paper's division by 1 + λα."""

    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.98, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.92, ge=0, lt=1, description="decay of the mean difference of two gradients")
        beta3: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean squared Nesterov gradient")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return library_class("Adan")(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2, config.beta3),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            weight_decouple=True,
        )


EXPORT = Adan
