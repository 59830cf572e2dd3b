"""`derf`: dynamic erf in place of a norm.

Source: Chen et al. 2025, "Stronger Normalization-Free Transformers", arXiv:2512.10938.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.norms import AbstractNorm


class DynamicErf(AbstractNorm):
    """Dynamic erf: y = γ ⊙ erf(αx + s) + β.

    α and s are one learned number each. γ starts at 1, β at 0. Entries do not depend on each other.
    """

    class Config(Settings):
        """Settings of slope and shift."""

        alpha: float = Field(default=0.5, gt=0, description="value at which the learned slope α starts")
        shift: float = Field(default=0.0, description="value at which the learned shift s starts")

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), config.alpha))
        self.shift = nn.Parameter(torch.full((1,), config.shift))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.erf(self.alpha * x + self.shift) + self.bias


EXPORT = DynamicErf
