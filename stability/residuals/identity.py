"""The plain residual connection, x + F(x)."""

from __future__ import annotations

from torch import Tensor

from stability.config import Settings
from stability.residuals import AbstractSingleStream, Branch


class Identity(AbstractSingleStream):
    """X' = X + F(X) with the state (B, N, D)."""

    class Config(Settings):
        """This part has no settings."""

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        return state + branch(state)


EXPORT = Identity
