"""Blocks conditioned on a noise level by adaLN-zero.

Sources: Peebles & Xie 2023, arXiv:2212.09748; for discrete diffusion, Lou et al. 2024.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stability.models.init import OwnInit

LONGEST_PERIOD = 10_000.0


class ConditionShape(NamedTuple):
    """The shape of a condition.

    Attributes:
        width: C.
        sinusoids: number of sinusoids of σ, its input.
    """

    width: int
    sinusoids: int


class NoiseLevel(nn.Module):
    """The condition of a noise level: σ (B,) → (B, C).

    σ → sinusoids (cos and sin at periods from 2π to nearly 2π·10⁴) → Linear, SiLU, Linear → SiLU.
    """

    def __init__(self, shape: ConditionShape):
        super().__init__()
        self.num_sinusoids = shape.sinusoids
        self.hidden = nn.Linear(shape.sinusoids, shape.width)
        self.condition = nn.Linear(shape.width, shape.width)

    def forward(self, sigma_B: Tensor) -> Tensor:
        silu = nn.functional.silu
        return silu(
            self.condition(silu(self.hidden(sinusoids(sigma_B, self.num_sinusoids).to(self.hidden.weight.dtype))))
        )


def sinusoids(sigma_B: Tensor, num: int) -> Tensor:
    """Return cos, then sin of σ·10⁴^(−k/h), (B, num) with num even.

    h = num/2 and k = 0 … h − 1; in float32 or wider.
    """
    wide = torch.promote_types(sigma_B.dtype, torch.float32)
    half = num // 2
    rates = torch.exp(torch.arange(half, dtype=wide, device=sigma_B.device) * (-math.log(LONGEST_PERIOD) / half))
    angles = sigma_B.to(wide)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Modulated(NamedTuple):
    """The effect of a condition on one branch.

    Attributes:
        shift: (B, 1, D), in x·(1 + scale) + shift before the branch.
        scale: (B, 1, D), likewise.
        gate: (B, 1, D), factor of the branch's output.
    """

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def shift_and_scale(self, x_BND: Tensor) -> Tensor:
        return x_BND * (1 + self.scale) + self.shift


class Modulation(OwnInit):
    """Shift, scale and gate of a block's two branches, linear in the condition.

    All start at zero, so a block starts as the identity.
    """

    def __init__(self, condition_width: int, width: int):
        super().__init__()
        self.chunks = _zero_linear(condition_width, 6 * width)

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"chunks.weight", "chunks.bias"})

    def forward(self, condition_BC: Tensor) -> tuple[Modulated, Modulated]:
        chunks = self.chunks(condition_BC)[:, None].chunk(6, dim=-1)
        return Modulated(*chunks[:3]), Modulated(*chunks[3:])


class FinalModulation(OwnInit):
    """Shift and scale after the final norm, x·(1 + scale) + shift; zero at the start."""

    def __init__(self, condition_width: int, width: int):
        super().__init__()
        self.chunks = _zero_linear(condition_width, 2 * width)

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"chunks.weight", "chunks.bias"})

    def forward(self, hidden_BND: Tensor, condition_BC: Tensor) -> Tensor:
        shift, scale = self.chunks(condition_BC)[:, None].chunk(2, dim=-1)
        return hidden_BND * (1 + scale) + shift


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
