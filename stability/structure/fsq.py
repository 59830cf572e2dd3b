"""Finite scalar quantization (Mentzer et al. 2023, arXiv:2309.15505).

The codebook is a fixed grid: nothing to learn, nothing to collapse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

MARGIN = 1e-3  # relative distance of the tanh bounds beyond the outermost levels, so that those are reached


class FSQ(nn.Module):
    """Finite scalar quantizer: z (…, F) → codes on a grid in [−1, 1]^F, and their indices.

    The grid has L_1 × … × L_F points, the indices run from 0 to ΠL − 1. Dimension f is bounded by tanh to an interval
    with L_f integers, then rounded. The gradient passes the rounding unchanged (straight-through), so it is that of the
    bound. The index is the mixed-radix number of the digits, least significant dimension first.
    """

    def __init__(self, levels: Sequence[int]):
        super().__init__()
        if not levels or min(levels) < 2:
            raise ValueError(f"levels={list(levels)}: each dimension needs at least 2 levels; e.g. [7,5,5,5,5]")
        self.levels = tuple(levels)
        self.num_codes = math.prod(self.levels)
        levels_F = torch.tensor(self.levels)
        place_F = torch.tensor([math.prod(self.levels[:index]) for index in range(len(self.levels))])
        half_F = (levels_F - 1) * (1 + MARGIN) / 2
        offset_F = torch.where(levels_F % 2 == 0, 0.5, 0.0)  # an even number of integers lies around −1/2
        for name, value in (("levels_F", levels_F), ("place_F", place_F), ("half_F", half_F), ("offset_F", offset_F)):
            self.register_buffer(name, value, persistent=False)
        self.levels_F: Tensor
        self.place_F: Tensor
        self.half_F: Tensor
        self.offset_F: Tensor

    def bound(self, z: Tensor) -> Tensor:
        """Return h·tanh(z + s) − o, inside (−L/2, L/2).

        h is just above (L − 1)/2; o = 1/2 for even L, else 0; s maps 0 to 0.
        """
        shift_F = torch.atanh(self.offset_F / self.half_F)
        return self.half_F * torch.tanh(z + shift_F) - self.offset_F

    def forward(self, z: Tensor) -> Tensor:
        """Return the codes (…, F) in [−1, 1], with the straight-through gradient."""
        bounded = self.bound(z)
        return (bounded + (bounded.round() - bounded).detach()) / (self.levels_F // 2)

    def indices(self, codes: Tensor) -> Tensor:
        """Return the indices (…), int64, of codes (…, F)."""
        half_F = self.levels_F // 2
        return ((codes * half_F).round().long() + half_F).mul(self.place_F).sum(-1)

    def codes(self, indices: Tensor) -> Tensor:
        """Return the codes (…, F) of indices (…), int64.

        Raises:
            ValueError: an index lies outside the codebook.
        """
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_codes:
            raise ValueError(
                f"structure tokens lie in 0 … {self.num_codes - 1}; got {int(indices.min())} … {int(indices.max())}"
            )
        half_F = self.levels_F // 2
        return (indices[..., None] // self.place_F % self.levels_F - half_F) / half_F
