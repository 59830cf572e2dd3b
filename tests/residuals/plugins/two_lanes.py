"""Two residual streams of somebody's own, with ``coefficients`` of another meaning: no class says what they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.residuals import AbstractResidual, Branch


class TwoLanes(AbstractResidual):
    """X' = cX + (1 − c)·(X's lanes swapped) + F(X_0), with a learned c; the state is (B, N, 2, D)."""

    class Config(Settings):
        """No settings."""

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__(config, width=width, layer=layer)
        self.share = nn.Parameter(torch.tensor(0.9))

    def coefficients(self, x_BNSD: Tensor) -> Tensor:
        return self.share

    def enter(self, x_BND: Tensor) -> Tensor:
        return torch.stack([x_BND, x_BND], -2)

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        mixed = self.share * state + (1 - self.share) * state.flip(-2)
        return mixed + branch(state[..., 0, :]).unsqueeze(-2)

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        return final_norm(state.sum(-2))


EXPORT = TwoLanes
