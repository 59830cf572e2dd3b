"""A feed-forward network without a matrix: each entry by itself."""

from __future__ import annotations

import torch
from torch import nn

from stability.config import Settings
from stability.ffns import AbstractFeedForward


class Scaling(AbstractFeedForward):
    """A rectified entry times a learned number."""

    class Config(Settings):
        pass

    def __init__(self, config, width, multiple):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x_BND):
        return x_BND.relu() * self.scale


EXPORT = Scaling
