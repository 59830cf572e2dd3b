"""Schedule-free AdamW (Defazio et al. 2024), from pytorch_optimizer, always in training mode."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters, library_class


class ScheduleFreeAdamW(AbstractOptimizer):
    """Schedule-free AdamW, "The Road Less Scheduled", Algorithm 1, with weight decay at y.

    Defazio et al. 2024, arXiv:2405.15682. Gradients are evaluated at y = (1 − β₁)z + β₁x, the model's parameters during
    training. z ← z − α(g/(√v̂ + ε) + λy). x is the mean of all z so far; step t has weight t^r · (largest α so far)^p.
    x is validated, sampled from and saved in checkpoints. u is the step of y and not linear in the rate: x and z
    contain the effects of earlier rates.
    """

    lr_reference = 2.5e-3
    elementwise = True
    linear_in_lr = False
    averages = True
    schedules = ("constant",)

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, gt=0, lt=1, description="share of the mean x in y, where gradients are taken")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")
        step_power: float = Field(default=0.0, ge=0, description="r: step t weighs t^r in the mean x")
        lr_power: float = Field(
            default=2.0, ge=0, description="p: a step weighs the largest rate so far to this power in the mean x"
        )

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = _make_averaging_class()(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            r=config.step_power,
            weight_lr_power=config.lr_power,
        )
        return made


@cache
def _make_averaging_class() -> Any:
    """Return pytorch_optimizer's class with its means exposed."""
    library: Any = library_class("ScheduleFreeAdamW")

    # `averaged` replaces the library's eval() and train(): these change the parameters in place, and rounding prevents
    # restoring them exactly
    class Averaging(library):
        """Schedule-free AdamW that stays in training mode."""

        # the library adds 1e-15 to v̂ inside the root; its root, 3e-8, would exceed ε = 1e-8
        apply_ams_bound = staticmethod(partial(library.apply_ams_bound, exp_avg_sq_eps=0.0))
        apply_ams_bound_foreach = staticmethod(partial(library.apply_ams_bound_foreach, exp_avg_sq_eps=0.0))

        @torch.no_grad()
        def averaged(self) -> dict[Tensor, Tensor]:
            """Return each parameter's x, (y − (1 − β₁)z)/β₁; before the first step, y."""
            found: dict[Tensor, Tensor] = {}
            for group in self.param_groups:
                weight = 1.0 - 1.0 / group["betas"][0]
                for y in group["params"]:
                    found[y] = torch.lerp(y, self.state[y].get("z", y), weight)
            return found

    return Averaging


EXPORT = ScheduleFreeAdamW
