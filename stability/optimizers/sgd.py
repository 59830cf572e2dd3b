"""Stochastic gradient descent, from torch."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters


class SGD(AbstractOptimizer):
    """Stochastic gradient descent, ``torch.optim.SGD``; the case in which α_max reduces to the paper's Eq. 19."""

    lr_reference = 0.1
    elementwise = True

    class Config(Settings):
        momentum: float = Field(default=0.0, ge=0, lt=1, description="decay of the velocity")
        weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)


EXPORT = SGD
