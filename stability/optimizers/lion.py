"""Lion (Chen et al. 2023), from pytorch_optimizer."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters, library_class


class Lion(AbstractOptimizer):
    """Steps along the sign of an interpolated momentum (Chen et al. 2023, Algorithm 2).

    All steps have ‖u‖∞ = 1. Learning rates are therefore 3 to 10 times smaller than AdamW's, and an equally strong
    weight decay as much larger.
    """

    update_family = "sign"
    lr_reference = 1e-4
    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="share of the momentum in what the sign is taken of")
        beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the momentum")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        betas = (config.beta1, config.beta2)
        return library_class("Lion")(parameters, lr=lr, betas=betas, weight_decay=config.weight_decay)


EXPORT = Lion
