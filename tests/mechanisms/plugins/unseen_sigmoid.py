"""Sigmoid attention of somebody's own, in the names of `sa`: it has ``qkv`` and ``heads`` and takes no softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._base import AbstractMechanism, MixerShape, without_padding


class SigmoidAttention(AbstractMechanism):
    """y_i = W_o Σ_j σ(q_i·k_j / √K) v_j + b_o per head, over the valid positions j, without rotation."""

    class Config(Settings):
        """No settings."""

    directions = frozenset({"bidirectional"})

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        return float(4 * num_positions * shape.width**2 + 2 * num_positions**2 * shape.width)

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(without_padding(x_BND, mask_BN)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        a_BHNN = torch.sigmoid(torch.einsum("bihk,bjhk->bhij", q, k) / q.shape[-1] ** 0.5)
        if mask_BN is not None:
            a_BHNN = a_BHNN * mask_BN[:, None, None]
        return self.out(torch.einsum("bhij,bjhk->bihk", a_BHNN, v).flatten(2))


EXPORT = SigmoidAttention
