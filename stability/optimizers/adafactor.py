"""Adafactor (Shazeer & Stern 2018), from torch."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters

FLOOR = 1e-15  # torch squares this; the square is the paper's ε₁, 1e-30


class Adafactor(AbstractOptimizer):
    """Steps scaled by a factored mean squared gradient: only row and column means are stored for a matrix.

    The RMS of a tensor's step is clipped. Steps are relative to the RMS of the tensor's parameters (Shazeer & Stern
    2018, Algorithms 4 to 6; ``torch.optim.Adafactor``). The rate at step t is min(lr, 1/√t), so not linear in lr: above
    1/√t a larger lr changes weight decay alone.
    """

    lr_reference = 1e-2
    linear_in_lr = False

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta2_power: float = Field(
            default=0.8, ge=0, description="p by which the mean squared gradient decays, 1 − t^−p at step t"
        )
        clip_threshold: float = Field(default=1.0, ge=1, description="largest RMS of a tensor's step over its rate")
        epsilon2: float = Field(default=1e-3, ge=0, description="least RMS of a tensor that its step is relative to")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(
            parameters,
            lr=lr,
            beta2_decay=-config.beta2_power,
            eps=(FLOOR, config.epsilon2),
            d=config.clip_threshold,
            weight_decay=config.weight_decay,
        )


EXPORT = Adafactor
