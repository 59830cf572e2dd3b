"""`bitnet`: BitNet b1.58, ternary weights and low-bit activations (Ma et al. 2024, arXiv:2402.17764)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.linears import AbstractLinear

EPSILON = 1e-5  # in the norm, and the smallest divisor


class BitLinear(nn.Linear):
    """Linear map with ternary weights, y = W̃x̃ + b.

    W̃ = γ·clamp(round(W/γ), −1, 1), γ = mean |W| (Eqs. 1 to 3). x̃ is the normed input rounded to multiples of max |x|
    / (2^(bits−1) − 1), separately at each position.

    Gradients use the straight-through estimator: rounding counts as the identity, W̃ = W + const and x̃ = x + const.
    Second derivatives are those of that surrogate; the loss itself is piecewise constant in W/γ.

    Attributes:
        is_ternary: whether the weight is W̃ itself, as in a deployed model.
    """

    is_ternary: bool = False

    def __init__(self, config: BitNet.Config, dense: nn.Linear):
        super().__init__(dense.in_features, dense.out_features, dense.bias is not None, device="meta")
        self.weight, self.bias, self.config = dense.weight, dense.bias, config

    def forward(self, input: Tensor) -> Tensor:
        x = nn.functional.rms_norm(input, input.shape[-1:], eps=EPSILON) if self.config.norm else input
        weight = self.weight if self.is_ternary else _straight_through(self.weight, self.ternary())
        return nn.functional.linear(_straight_through(x, self._round(x)), weight, self.bias)

    @torch.no_grad()
    def ternary(self) -> Tensor:
        """Return W̃, with entries −γ, 0 and γ."""
        gamma = self.scale_of(self.weight)
        return (self.weight / gamma).round().clamp(-1, 1) * gamma

    @staticmethod
    def scale_of(weight: Tensor) -> Tensor:
        """Return γ, the mean |W|."""
        return weight.abs().mean().clamp_min(EPSILON)

    @torch.no_grad()
    def _round(self, x: Tensor) -> Tensor:
        unit = x.abs().amax(-1, keepdim=True).clamp_min(EPSILON) / (2 ** (self.config.bits - 1) - 1)
        return (x / unit).round() * unit


def _straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the derivatives of ``value``."""
    return value + (rounded - value).detach()


class BitNet(AbstractLinear):
    """Turns every linear map in mixers and feed-forward networks into a `BitLinear`.

    Embedding and head stay dense.
    """

    class Config(Settings):
        """Settings for a map's input."""

        bits: int = Field(default=8, ge=2, le=16, description="bits of an activation; the weights are ternary")
        norm: bool = Field(default=True, description="whether the input is divided by its root mean square first")

    @classmethod
    def of(cls, config: Config, dense: nn.Linear) -> nn.Linear:
        return BitLinear(config, dense)


EXPORT = BitNet
