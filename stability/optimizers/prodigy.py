"""Prodigy (Mishchenko & Defazio 2023), from pytorch_optimizer."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters, library_class


class Prodigy(AbstractOptimizer):
    """Adam with a rate found by itself (Mishchenko & Defazio 2023, arXiv:2306.06101, Algorithm 4).

    α is the learning rate and d estimates the distance to the solution, one number for all parameters:

    - r ← √β₂·r + (1 − √β₂)·αd²⟨g, θ₀ − θ⟩ and s ← √β₂·s + (1 − √β₂)·αd²g; the code omits the common factor.
    - d ← max(d, r/‖s‖₁).
    - m ← β₁m + (1 − β₁)dg and v ← β₂v + (1 − β₂)d²g².
    - θ ← θ − αd(m/(√v + dε) + λθ).

    ε is multiplied by the new d, as in the authors' code, and everything else by the previous one. α multiplies d's
    step; 1 is the usual choice. d depends on all rates so far.
    """

    lr_reference = 1.0
    linear_in_lr = False
    is_multiplier = True

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times α·d")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        beta3: float | None = Field(
            default=None, ge=0, lt=1, description="decay of what the distance comes from; null: the root of beta2"
        )
        epsilon: float = Field(default=1e-8, gt=0, description="times d, added to the root of the mean square")
        d0: float = Field(default=1e-6, gt=0, description="first estimate of the distance to the solution")
        d_coef: float = Field(default=1.0, gt=0, description="factor of every later estimate of the distance")
        growth_rate: float | None = Field(
            default=None, gt=1, description="largest factor by which the distance grows in a step; null: any"
        )
        bias_correction: bool = Field(default=False, description="whether the means are corrected for starting at 0")
        safeguard_warmup: bool = Field(
            default=False, description="whether the learning rate is left out of the distance's denominator"
        )

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = _make_rate_class()(
            parameters,
            lr=lr,
            betas=(config.beta1, config.beta2),
            beta3=config.beta3,
            eps=config.epsilon,
            d0=config.d0,
            d_coef=config.d_coef,
            growth_rate=math.inf if config.growth_rate is None else config.growth_rate,
            weight_decay=config.weight_decay,
            weight_decouple=True,
            bias_correction=config.bias_correction,
            safeguard_warmup=config.safeguard_warmup,
        )
        return made

    @classmethod
    def by_group(cls, config: Config) -> str:
        """Describe the settings that the library reads for each group.

        The library reads the others from the first or last group only.
        """
        return repr((config.weight_decay, config.epsilon))


@cache
def _make_rate_class() -> Any:
    """Return pytorch_optimizer's class with its rate exposed."""
    library: Any = library_class("Prodigy")

    class Telling(library):
        """Prodigy with its rate exposed."""

        def rate_found(self) -> float:
            """Return α·d of the next step."""
            first = self.param_groups[0]
            return float(first["d"] * first["lr"])

    return Telling


EXPORT = Prodigy
