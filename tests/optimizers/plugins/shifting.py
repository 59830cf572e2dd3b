"""A mechanism without a matrix: each position reads the one before it."""

from __future__ import annotations

import torch
from torch import nn

from stability.config import Settings
from stability.mechanisms import AbstractMechanism


class Shifting(AbstractMechanism):
    """The entries of the position before, each times a learned number."""

    class Config(Settings):
        pass

    directions = frozenset({"bidirectional", "causal"})

    def __init__(self, config, shape):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape.width))

    @classmethod
    def cost(cls, config, shape, num_positions):
        return float(num_positions * shape.width)

    def forward(self, x_BND, *, mask_BN=None):
        kept = x_BND if mask_BN is None else x_BND.where(mask_BN[..., None], 0.0)
        return nn.functional.pad(kept[:, :-1], (0, 0, 1, 0)) * self.scale


EXPORT = Shifting
