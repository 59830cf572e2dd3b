"""Define what recurrent mechanisms share: a state of fixed size instead of all past positions, a short convolution,
a norm of each head, vectors of length 1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, AbstractMechanism, without_padding
from stability.models.precision import at_least_float32, in_float32


class AbstractRecurrent(AbstractMechanism):
    """A causal mechanism in which a position knows the past only by a state, whose size does not depend on how much
    past there is. Its positions are not rotated: order is in the recurrence.

    Padding changes nothing: there the state neither forgets (decay 1) nor takes in (key, β, Δ or value 0), and a short
    convolution reads zeros. Only `titans` with chunks of several positions counts padded ones among them. A subclass
    says in `state_size` how large the state is.
    """

    directions = frozenset({CAUSAL})


class ShortConvolution(nn.Module):
    """A causal convolution of each feature along the positions: y_t = Σ_{j < W} w_{W−1−j} ⊙ x_{t−j} (+ b), with zeros
    before the beginning; the parameters are those of torch's ``nn.Conv1d(width, width, W, groups=width)``, the outputs
    those of its first N places after a padding of W − 1.
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
        """Return the convolution; a position where ``mask_BN`` is False counts as zeros for the others."""
        num = x_BND.shape[1]
        weight_DW = self.weight[:, 0, -num:]  # a longer kernel reads zeros from before the beginning
        kernel = weight_DW.shape[1]
        padded_BMD = F.pad(without_padding(x_BND, mask_BN), (0, 0, kernel - 1, 0))
        # written as a sum of shifts: a convolution of the library has no rule of higher derivatives in every engine
        y_BND = padded_BMD[:, :num] * weight_DW[:, 0]
        for shift in range(1, kernel):
            y_BND = y_BND + padded_BMD[:, shift : shift + num] * weight_DW[:, shift]
        return y_BND if self.bias is None else y_BND + self.bias


class HeadNorm(nn.Module):
    """A norm of each head's features by their root mean square, y = γ ⊙ x / √(mean x² + ε), γ (K,) the same for all
    heads and 1 at first; in float32 or wider.

    ``centred``: whether their mean is taken away before, so that it is the variance that is divided by: a group norm
    with the heads as groups. No other position is read.
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


def of_length_one(x: Float[Tensor, "*rows K"], *, epsilon: float = 1e-6) -> Float[Tensor, "*rows K"]:
    """Return x / √(Σ x² + ε) over the last axis, in float32 or wider: twice differentiable at zero, too, where torch's
    own ``normalize`` gives NaN."""
    with in_float32(x.device):
        x = at_least_float32(x)
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)
