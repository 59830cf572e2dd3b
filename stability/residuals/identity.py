"""The plain residual connection, x + F(x)."""

from __future__ import annotations

from torch import Tensor, nn

from stability.config import Settings
from stability.residuals._base import AbstractResidual, Branch


class Identity(AbstractResidual):
    """X' = X + F(X); the state is (B, N, D)."""

    class Config(Settings):
        """This part has no settings."""

    def enter(self, x_BND: Tensor) -> Tensor:
        return x_BND

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        return state + branch(state)

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        return final_norm(state)


EXPORT = Identity
