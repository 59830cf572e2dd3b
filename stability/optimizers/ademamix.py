"""AdEMAMix (Pagliardini et al. 2024), from pytorch_optimizer."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters, library_class


class AdEMAMix(AbstractOptimizer):
    """Adam with a second, slow mean of the gradients (Pagliardini et al. 2024, Algorithm 1).

    The slow mean has no bias correction. With ``warmup_steps`` its weight grows from 0 and its decay from β₁, by the
    paper's schedules.
    """

    update_family = "adam"
    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the fast mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        beta3: float = Field(default=0.9999, ge=0, lt=1, description="decay of the slow mean gradient")
        alpha: float = Field(default=5.0, ge=0, description="weight of the slow mean; the fast one has 1")
        warmup_steps: int | None = Field(
            default=None,
            ge=1,
            description="steps over which alpha and beta3 grow to what they are (the paper: the whole run); null: none",
        )
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")

        @model_validator(mode="after")
        def _beta3_grows(self) -> AdEMAMix.Config:
            if self.warmup_steps is not None and not 0 < self.beta1 <= self.beta3:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps} lets beta3 grow from beta1, which then is above 0 and at most "
                    f"beta3; beta1={self.beta1:g}, beta3={self.beta3:g}"
                )
            return self

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return library_class("AdEMAMix")(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2, config.beta3),
            alpha=config.alpha,
            t_alpha_beta3=config.warmup_steps,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            weight_decouple=True,
        )


EXPORT = AdEMAMix
