"""Stochastic gradient descent, from torch."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, model_validator

from stability.config import Settings
from stability.config.identity import Since
from stability.optimizers._base import AbstractOptimizer, Parameters


class SGD(AbstractOptimizer):
    """Stochastic gradient descent, ``torch.optim.SGD``.

    For SGD, α_max reduces to the paper's Eq. 19.
    """

    update_family = "sgd"
    lr_reference = 0.1
    elementwise = True

    class Config(Settings):
        momentum: float = Field(default=0.0, ge=0, lt=1, description="decay of the velocity")
        weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient")
        nesterov: Annotated[bool, Since(False, of=("sgd",))] = Field(
            default=False, description="step along the gradient and the decayed velocity that it gave (Nesterov)"
        )

        @model_validator(mode="after")
        def _there_is_a_velocity(self) -> SGD.Config:
            if self.nesterov and not self.momentum:
                raise ValueError("nesterov=true changes nothing where momentum=0; give a momentum, e.g. 0.9")
            return self

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)
        for group in optimizer.param_groups:
            # not by torch's argument: torch refuses it if the momentum is 0
            group["nesterov"] = config.nesterov
        return optimizer


EXPORT = SGD
