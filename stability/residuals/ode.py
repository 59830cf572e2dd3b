"""A residual connection as Runge–Kutta steps of an ordinary differential equation.

Source: ODE Transformer, Li et al. 2022, arXiv:2203.09176.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.models.passes import at_least_float32, in_float32
from stability.residuals import AbstractSingleStream, Branch


class Ode(AbstractSingleStream):
    """``steps`` steps of length h along dX/dt = F(X): X' = X + h·ΔX.

    F is the branch with its norm.

    - euler: ΔX = F_1 = F(X); with h = 1 the plain connection, bit for bit.
    - rk2: ΔX = (F_1 + F_2)/2, F_2 = F(X + h F_1) (Heun; the paper's RK2 block).
    - rk4: ΔX = (F_1 + 2 F_2 + 2 F_3 + F_4)/6, F_2 = F(X + h F_1/2), F_3 = F(X + h F_2/2), F_4 = F(X + h F_3).
    - gated: ΔX = g F_1 + (1 − g) F_2, F_2 as in rk2, g = σ(W [F_1; F_2] + b), one g per token. W and b start at 0, so
      an untrained model equals rk2; weight decay does not apply to b.

    The paper's F is a whole layer, attention and feed-forward network together, and all layers share one gate. Here F
    is one branch, and each connection has its own gate. The paper's code draws W (Xavier).

    Each evaluation of F is a pass of the branch and counts as one in `evaluations`. It has its own dropout masks in
    training, as in the paper's code. A branch's own loss is averaged over its evaluations. Branches are initialised by
    the number of connections, for any number of evaluations: the weights of a step sum to h.
    """

    class Config(Settings):
        """The scheme and its steps."""

        scheme: Literal["euler", "rk2", "rk4", "gated"] = Field(
            default="gated", description="what a step evaluates: the branch once, twice, four times, twice with a gate"
        )
        step: float = Field(default=1.0, gt=0, description="length h of a step; 1 adds as much as a plain connection")
        steps: int = Field(default=1, ge=1, description="steps that one connection takes, one after another")

    own_fan_in: ClassVar = {"weight": 0}
    stages: ClassVar[dict[str, int]] = {"euler": 1, "rk2": 2, "rk4": 4, "gated": 2}

    def __init__(self, config: Config, *, width: int, layer: int):
        super().__init__(config, width=width, layer=layer)
        self.config = config
        if config.scheme == "gated":
            self.weight, self.bias = nn.Parameter(torch.zeros(2 * width, 1)), nn.Parameter(torch.zeros(1))

    @classmethod
    def evaluations(cls, config: Any) -> int:
        return cls.stages[config.scheme] * config.steps

    @property
    def own_decay(self) -> dict[str, bool]:
        return {"bias": False} if self.config.scheme == "gated" else {}

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        def field(x_BND: Tensor) -> Tensor:
            # products may be in bfloat16; they are weighed in the state's dtype
            return branch(x_BND).to(x_BND.dtype)

        for _ in range(self.config.steps):
            state = state + self.config.step * self._increment(state, field)
        return state

    def _increment(self, x_BND: Tensor, field: Branch) -> Tensor:
        """Return ΔX of one step, (B, N, D)."""
        h = self.config.step
        first_BND = field(x_BND)
        if self.config.scheme == "euler":
            return first_BND
        if self.config.scheme == "rk4":
            second_BND = field(x_BND + h / 2 * first_BND)
            third_BND = field(x_BND + h / 2 * second_BND)
            fourth_BND = field(x_BND + h * third_BND)
            return (first_BND + 2 * (second_BND + third_BND) + fourth_BND) / 6
        second_BND = field(x_BND + h * first_BND)
        if self.config.scheme == "rk2":
            return (first_BND + second_BND) / 2
        return self._gate(first_BND, second_BND)

    def _gate(self, first_BND: Tensor, second_BND: Tensor) -> Tensor:
        """Return g F_1 + (1 − g) F_2; g is in float32 or wider."""
        with in_float32(first_BND.device):
            both_BNE = at_least_float32(torch.cat([first_BND, second_BND], -1))
            gate_BN1 = (both_BNE @ self.weight.to(both_BNE.dtype) + self.bias).sigmoid()
            return (second_BND + gate_BN1 * (first_BND - second_BND)).to(first_BND.dtype)


EXPORT = Ode
