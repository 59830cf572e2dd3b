"""AdamW (Loshchilov & Hutter 2017), from torch or by a kernel."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import Impl
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._probing import ProbingAdamW


class AdamW(AbstractOptimizer):
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` in its fused form; weight decay on every parameter, as
    the consensus paper's "default weight decay" reads, or as nanoGPT decays. With ``impl=triton`` a kernel takes the
    same step and adds up its norm and slope on the way; a checkpoint of either goes on with the other."""

    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=1e-2, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        decay: Annotated[Literal["all", "matrices"], Since("all", of=("adamw",))] = Field(
            default="all", description="what is decayed: all parameters, or those of two axes or more (nanoGPT)"
        )
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")
        impl: Impl = "reference"

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        betas = (config.beta1, config.beta2)
        kind = ProbingAdamW if config.impl == "triton" else torch.optim.AdamW
        return kind(parameters, lr=lr, betas=betas, eps=config.epsilon, weight_decay=config.weight_decay, fused=True)

    @classmethod
    def decays(cls, config: Config, parameter: nn.Parameter) -> bool:
        return config.decay == "all" or parameter.ndim >= 2


EXPORT = AdamW
