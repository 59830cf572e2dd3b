"""Shared parts for recurrent mechanisms: fixed-size state, short convolution, head norm, unit vectors."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, AbstractMechanism, without_padding
from stability.models.passes import at_least_float32, in_float32


class AbstractRecurrent(AbstractMechanism):
    """A causal mechanism with a state of fixed size instead of all past positions.

    Positions are not rotated: order is in the recurrence. Padding changes nothing: the state neither decays (decay 1)
    nor takes input (key, β, Δ or value 0), and a short convolution reads zeros. One exception: `titans` with chunks
    longer than 1 counts padded positions in its chunks. A subclass implements `state_size`.
    """

    directions = frozenset({CAUSAL})


class ShortConvolution(nn.Module):
    """Causal convolution per feature, y_t = Σ_{j < W} w_{W−1−j} ⊙ x_{t−j} (+ b).

    Positions before the start are zero. Parameters equal those in ``nn.Conv1d(width, width, W, groups=width)``; outputs
    equal its first N with padding W − 1.
    """

    def __init__(self, width: int, kernel: int = 4, *, bias: bool = False):
        super().__init__()
        if kernel < 1:
            raise ValueError(f"a convolution over {kernel} positions; it needs at least 1")
        self.weight = nn.Parameter(torch.empty(width, 1, kernel).uniform_(-1, 1) / math.sqrt(kernel))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(
        self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B N D"]:
        """Return the convolution; padded positions (``mask_BN`` False) count as zeros."""
        num = x_BND.shape[1]
        weight_DW = self.weight[:, 0, -num:]  # a longer kernel reads zeros before the start
        kernel = weight_DW.shape[1]
        padded_BMD = F.pad(without_padding(x_BND, mask_BN), (0, 0, kernel - 1, 0))
        # a sum of shifts: the library's convolution lacks higher derivatives in some engines
        y_BND = padded_BMD[:, :num] * weight_DW[:, 0]
        for shift in range(1, kernel):
            y_BND = y_BND + padded_BMD[:, shift : shift + num] * weight_DW[:, shift]
        return y_BND if self.bias is None else y_BND + self.bias


class HeadNorm(nn.Module):
    """Root mean square norm per head, y = γ ⊙ x / √(mean x² + ε), in float32 or wider.

    γ (K,) is shared by all heads and initially 1. With ``centred`` the mean is subtracted first, so that the divisor is
    the standard deviation: a group norm with heads as groups. No other position is read.
    """

    def __init__(self, head_width: int, *, centred: bool = False, epsilon: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_width))
        self.centred, self.epsilon = centred, epsilon

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
        with in_float32(x.device):
            x = at_least_float32(x)
            if self.centred:
                x = x - x.mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def l2_normalise(x: Float[Tensor, "*rows K"], *, epsilon: float = 1e-6) -> Float[Tensor, "*rows K"]:
    """Return x / √(Σ x² + ε) over the last axis, in float32 or wider.

    Twice differentiable at zero too; torch's ``normalize`` gives NaN there.
    """
    with in_float32(x.device):
        x = at_least_float32(x)
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)


Positive = Annotated[float, Field(gt=0)]
Pair = tuple[Positive, Positive]


def require_rising(mechanism: str) -> AfterValidator:
    """Return a validator for a range setting: a `Pair` with first ≤ second."""

    def check(given: Pair, info: Any) -> Pair:
        if given[0] > given[1]:
            raise ValueError(
                f"mechanism.{mechanism}.{info.field_name}={list(given)} must begin with the smaller number"
            )
        return given

    return AfterValidator(check)


def draw_steps(num: int, dt_range: tuple[float, float]) -> Float[Tensor, " F"]:
    """Return softplus⁻¹(Δ) = ln(e^Δ − 1) for ``num`` steps Δ, log-uniform in ``dt_range``.

    As a bias before softplus it yields Δ.
    """
    first, last = (math.log(step) for step in dt_range)
    dt_F = torch.empty(num).uniform_(first, last).exp()
    return dt_F + (-torch.expm1(-dt_F)).log()
