"""A linear attention of somebody's own, that says how large its state is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms import MixerShape, without_padding
from stability.mechanisms._recurrent import AbstractRecurrent, ShortConvolution


class Remembering(AbstractRecurrent):
    """y_t = W_o S_t q_t with S_t = ½ S_{t−1} + v_t k_tᵀ, for one head; k and q of width D/2, v short-convolved."""

    class Config(Settings):
        """No settings."""

    KERNEL = 3

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.query, self.key = (nn.Linear(shape.width, shape.width // 2) for _ in range(2))
        self.value, self.out = (nn.Linear(shape.width, shape.width) for _ in range(2))
        self.convolution = ShortConvolution(shape.width, self.KERNEL)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        return float(num_positions * shape.width**2 * 5)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return shape.width**2 // 2 + (cls.KERNEL - 1) * shape.width

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        x_BND = without_padding(x_BND, mask_BN)
        k_BNK, v_BND = self.key(x_BND), self.convolution(self.value(x_BND), mask_BN=mask_BN)
        position_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        decay_NN = (0.5 ** (position_N[:, None] - position_N).clamp_min(0)).tril()
        return self.out((self.query(x_BND) @ k_BNK.mT * decay_NN) @ v_BND)


EXPORT = Remembering
