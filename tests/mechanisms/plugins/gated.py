"""A gated mean of somebody's own, whose constructor starts a gate open and rates in a range, as recurrent mixers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms import AbstractMechanism, MixerShape, without_padding


class GatedMean(AbstractMechanism):
    """y_i = W_o(σ(W_g x_i + b_g) ⊙ Σ_{j ≤ i} e^(−softplus(W_r x_i + b_r)·(i − j)) ⊙ x_j) + b_o.

    The gate begins open, b_g = 3; the rates begin on a logarithmic scale from 1e-3 to 1e-1, whatever x is: W_r = 0.
    """

    class Config(Settings):
        """No settings."""

    directions = frozenset({"causal"})

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.gate, self.rate, self.out = (nn.Linear(shape.width, shape.width) for _ in range(3))
        nn.init.constant_(self.gate.bias, 3.0)
        nn.init.zeros_(self.rate.weight)
        with torch.no_grad():
            self.rate.bias.copy_(torch.logspace(-3, -1, shape.width).expm1().log())

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"gate.bias", "rate.weight", "rate.bias"})

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        return float(num_positions * shape.width * (3 * shape.width + num_positions))

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        x_BND = without_padding(x_BND, mask_BN)
        position_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        distance_NN = position_N[:, None] - position_N
        rate_BND = nn.functional.softplus(self.rate(x_BND))
        weights_BNND = torch.exp(-rate_BND[:, :, None] * distance_NN.clamp_min(0)[..., None])
        seen_BNND = weights_BNND * (distance_NN >= 0)[..., None]
        return self.out(self.gate(x_BND).sigmoid() * (seen_BNND * x_BND[:, None]).sum(2))


EXPORT = GatedMean
