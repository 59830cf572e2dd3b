"""Sophia-H (Liu et al. 2023), hand-written, with external estimates of the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.optimizers._base import AbstractOptimizer, Parameters


class Sophia(AbstractOptimizer):
    """Sophia with Hutchinson's estimate (Liu et al. 2023, arXiv:2305.14342, Algorithm 3), in the paper's unit.

    m ← β₁m + (1 − β₁)g; before steps 1, k + 1, 2k + 1, … h ← β₂h + (1 − β₂)ĥ; θ ← θ − α(clip(m/max(γh, ε), 1) + λθ),
    the decay first. ĥ = z ⊙ Hz with z ~ N(0, 1), for the step's whole batch (the paper: part of a batch). A run
    computes ĥ by Hessian-vector products of the step's loss. pytorch_optimizer's SophiaH clips m/max(h, ε) to ρ; its
    rate is this rate over ρ = γ.
    """

    lr_reference = 4e-4
    takes_hessian = True
    frozen = "its average h of the Hessian's diagonal"
    # not `elementwise`, although the formula is: Hessian-vector products need the whole model

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.96, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean of the diagonal's estimates")
        gamma: float = Field(default=0.01, gt=0, description="γ: the smaller, the more entries of a step are clipped")
        epsilon: float = Field(default=1e-12, gt=0, description="smallest number that the mean gradient is divided by")
        hessian_every: int = Field(default=10, ge=1, description="steps from one estimate of the diagonal to the next")

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        return SophiaH(parameters, {"lr": lr, **config.model_dump()})

    @classmethod
    def by_group(cls, config: Config) -> str:
        """Describe the settings that a group can have: all except ``hessian_every``."""
        return super().by_group(config.model_copy(update={"hessian_every": 1}))


class SophiaH(torch.optim.Optimizer):
    """Sophia as a torch optimizer; a step uses the current average h.

    The caller checks before each step whether an estimate is due. ``settings`` are the fields of `Sophia.Config`, and
    ``lr``.
    """

    def __init__(self, parameters: Parameters, settings: dict[str, Any]):
        super().__init__(parameters, {**settings, "step": 0})

    def hessian_is_due(self) -> bool:
        """Return whether the next step is number 1, k + 1, 2k + 1, …."""
        first = self.param_groups[0]
        return first["step"] % first["hessian_every"] == 0

    @torch.no_grad()
    def take_hessian(self, diagonal: Mapping[Tensor, Tensor]) -> None:
        """Add an estimate of the Hessian's diagonal to the average h.

        ``diagonal`` has one tensor in each parameter's shape.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"], state["hessian"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["hessian"].lerp_(diagonal[parameter], 1 - group["beta2"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one step.

        Raises:
            RuntimeError: no estimate of the diagonal was added before.
        """
        assert closure is None, "gradients are in the parameters"
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    raise RuntimeError("sophia: a step needs an estimate of the Hessian's diagonal: take_hessian first")
                mean = state["mean"].lerp_(parameter.grad, 1 - group["beta1"])
                clipped = (mean / (group["gamma"] * state["hessian"]).clamp(min=group["epsilon"])).clamp(-1, 1)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * clipped)


EXPORT = Sophia
