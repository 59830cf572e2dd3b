"""`dyt`: dynamic tanh in place of a norm.

Source: Zhu et al. 2025, "Transformers without Normalization", arXiv:2503.10622.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.norms import AbstractNorm


class DynamicTanh(AbstractNorm):
    """Dynamic tanh: y = γ ⊙ tanh(αx) + β.

    α is one learned number. γ starts at 1, β at 0. Entries do not depend on each other, and are not standardised first.
    """

    class Config(Settings):
        """Settings of the slope."""

        alpha: float = Field(
            default=0.5,
            gt=0,
            description="value at which the learned slope α starts; large models train with less (the paper's 7 B: 0.8 "
            "before attention, 0.2 elsewhere)",
        )

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), config.alpha))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


EXPORT = DynamicTanh
