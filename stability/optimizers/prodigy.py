"""Prodigy (Mishchenko & Defazio 2023), from pytorch_optimizer."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._library import library_class


class Prodigy(AbstractOptimizer):
    """Adam at a rate that it finds by itself (Mishchenko & Defazio 2023, arXiv:2306.06101, Algorithm 4).

    With α the learning rate and d the estimate of the distance to the solution: r ← √β₂·r + (1 − √β₂)·αd²⟨g, θ₀ − θ⟩
    and s ← √β₂·s + (1 − √β₂)·αd²g (the code leaves out the factor that both have), d ← max(d, r/‖s‖₁),
    m ← β₁m + (1 − β₁)dg, v ← β₂v + (1 − β₂)d²g², θ ← θ − αd(m/(√v + dε) + λθ), where ε is times the new d (as the
    authors' code has it) and all else times the one before. α multiplies what d makes of the step, and is 1 where
    nothing speaks against it. d is one number for all parameters, and depends on every rate so far.
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
        """Build the library's optimizer with its decoupled decay."""
        made: torch.optim.Optimizer = _telling()(
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
        """Describe what the library reads of each group; the rest it takes from the first or the last one."""
        return repr((config.weight_decay, config.epsilon))


@cache
def _telling() -> Any:
    """Return pytorch_optimizer's class, which says at what rate it steps."""
    library: Any = library_class("Prodigy")

    class Telling(library):
        """Prodigy that says at what rate it steps."""

        def rate_found(self) -> float:
            """Return α·d of the step that comes next."""
            first = self.param_groups[0]
            return float(first["d"] * first["lr"])

    return Telling


EXPORT = Prodigy
