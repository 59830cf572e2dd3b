"""A soft mixture of experts with a loss that balances them, as somebody outside of the repository would write it."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.ffns import AbstractFeedForward, WithLoss, at_least_float32


class SoftMixture(AbstractFeedForward):
    """y = W_o Σ_e p_e tanh(W_e x) with p = softmax(W_r x), and per sequence the loss balance·E·Σ_e p̄_e², p̄ the mean over
    the sequence's positions: ``balance`` at least, where all experts are used alike."""

    class Config(Settings):
        experts: int = Field(default=3, ge=1, description="number E of experts")
        balance: float = Field(default=0.5, ge=0, description="weight of the balance loss")

    def __init__(self, config: Config, width: int, multiple: float):
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(config.experts))
        self.out = nn.Linear(width, width)

    def forward(self, x_BND: Tensor) -> WithLoss:
        p_BNE = at_least_float32(self.router(x_BND)).softmax(-1)
        hidden_BNDE = torch.stack([expert(x_BND).tanh() for expert in self.experts], -1)
        share_BE = p_BNE.mean(1)
        loss_B = self.config.balance * self.config.experts * (share_BE * share_BE).sum(-1)
        return WithLoss(self.out((hidden_BNDE * p_BNE[..., None, :]).sum(-1)), loss_B)


EXPORT = SoftMixture
