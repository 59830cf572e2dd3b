"""A causal mechanism of somebody's own that counts positions from the beginning of what it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms import AbstractMechanism, MixerShape, without_padding


class Counting(AbstractMechanism):
    """y_n = W Σ_{m ≤ n} m·x_m over the valid positions."""

    class Config(Settings):
        """No settings."""

    directions = frozenset({"causal"})

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.out = nn.Linear(shape.width, shape.width)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        return float(num_positions * shape.width**2)

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        numbers_N1 = torch.arange(1, x_BND.shape[1] + 1, dtype=x_BND.dtype, device=x_BND.device)[:, None]
        return self.out((numbers_N1 * without_padding(x_BND, mask_BN)).cumsum(1))


EXPORT = Counting
