"""Shared parts for delta-rule mechanisms: projections, short convolution, unit keys, write strengths, head norm."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.impl import ImplOrFla
from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._delta_rule import chunk_size, products_per_chunk
from stability.mechanisms._fla import AbstractWithKernels
from stability.mechanisms._recurrent import HeadNorm, ShortConvolution, l2_normalise
from stability.models.passes import at_least_float32, in_float32


class DeltaSettings(Settings):
    """Settings shared by all delta-rule mechanisms."""

    conv: int = Field(default=4, ge=1, description="positions that the short convolutions of q, k and v read")
    expand_v: int = Field(default=1, ge=1, description="width of a head's values in widths of its keys")
    negative_eigenvalues: bool = Field(
        default=False, description="write strengths up to 2 in place of 1, so that a write can turn a direction round"
    )
    chunk: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = Field(
        default=32, description="positions computed at once, a power of two; changes no output"
    )
    impl: ImplOrFla = "reference"


class AbstractDeltaNet(AbstractWithKernels):
    """Base class for mechanisms with a delta-rule state.

    Per head S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ and y = W_o gated(norm(S_tᵀ q_t)). A write
    replaces the share β of the content at a key, instead of adding to it. S is (K, V), K the head width. Subclasses
    define a and the output gate.

    q, k, v are silu(conv(W x)), each feature convolved along positions. q and k are scaled to length 1, then q is
    divided by √K. β = σ(W_β x), doubled with ``negative_eigenvalues`` (Grazzi et al. 2025, arXiv:2411.12537). Above 1 a
    write reverses the sign of the content at a key.
    """

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.config, self.heads, self.key_width = config, shape.heads, shape.head_width
        self.largest_beta = 2.0 if config.negative_eigenvalues else 1.0
        self.rows = (shape.width, shape.width, shape.width * config.expand_v)
        self.qkv = nn.Linear(shape.width, sum(self.rows), bias=False)
        self.conv = ShortConvolution(sum(self.rows), config.conv)
        self.beta = nn.Linear(shape.width, shape.heads, bias=False)
        self.norm = HeadNorm(shape.head_width * config.expand_v)
        self.out = nn.Linear(self.rows[2], shape.width)

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv": self.rows}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count projections, convolution, and each chunk's matrix products and triangular system.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        width, values = shape.width, shape.width * config.expand_v
        size = chunk_size(config.chunk, num_positions)
        of_rule = products_per_chunk(
            size, shape.head_width, values // shape.heads, decays=cls.gate_weights(config, shape)[0] > 0
        )
        projected = width * (2 * width + values + shape.heads) + values * width + sum(cls.gate_weights(config, shape))
        convolved = min(config.conv, num_positions) * (2 * width + values)
        return num_positions * (projected + convolved) + math.ceil(num_positions / size) * shape.heads * of_rule

    @classmethod
    def gate_weights(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        """Return the number of weights in the decay's maps and in the output gate's."""
        return 0, 0

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of all heads' states plus the convolution's last inputs.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        values = shape.width * config.expand_v
        return shape.head_width * values + (config.conv - 1) * (2 * shape.width + values)

    def forward(
        self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        y_BHNV = self.run_delta_rule(self.config, *self.project(x_BND, mask_BN))
        return self.out(self.apply_gate(self.norm(y_BHNV.transpose(1, 2)), x_BND).flatten(2))

    def project(self, x_BND: Tensor, mask_BN: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return the arguments for `delta_rule`; β and ln a are 0 at padding.

        x must be zero at padding. Shapes: q and k (B, H, N, K), v (B, H, N, V), β (B, H, N), ln a (B, H, N, K or 1) or
        None.
        """
        convolved = F.silu(self.conv(self.qkv(x_BND), mask_BN=mask_BN))
        q_BHNK, k_BHNK, v_BHNV = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in convolved.split(self.rows, -1)
        )
        with in_float32(x_BND.device):
            beta_BNH = self.beta(at_least_float32(x_BND)).sigmoid() * self.largest_beta
            log_decay = self.log_decay(at_least_float32(x_BND))
        if mask_BN is not None:
            beta_BNH = beta_BNH.masked_fill(~mask_BN[..., None], 0.0)
        if mask_BN is not None and log_decay is not None:
            log_decay = log_decay.masked_fill(~mask_BN[..., None, None], 0.0)
        scaled_BHNK = l2_normalise(q_BHNK) / math.sqrt(self.key_width)
        return (
            scaled_BHNK,
            l2_normalise(k_BHNK),
            v_BHNV,
            beta_BNH.transpose(1, 2),
            None if log_decay is None else log_decay.transpose(1, 2),
        )

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B N H *"] | None:
        """Return ln a ≤ 0 per head, (…, K) or (…, 1) for all features; None if a = 1."""
        return None

    def apply_gate(self, y_BNHV: Tensor, x_BND: Tensor) -> Float[Tensor, "B N H V"]:
        """Return the input to the output projection, from normed reads."""
        return y_BNHV


def draw_rates(num: int, least: float, most: float = 16.0) -> nn.Parameter:
    """Return A_log, (num,), with e^A_log drawn from U(least, most).

    Mamba2 and its followers use most = 16.

    Args:
        num: number of rates.
        least: lower end.
        most: upper end.
    """
    return nn.Parameter(torch.empty(num).uniform_(least, most).log())


def draw_step_biases(num: int) -> nn.Parameter:
    """Return dt_bias, (num,), with softplus(dt_bias) log-uniform in [0.001, 0.1], as released."""
    dt = torch.empty(num).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


def log_of_decay(a_log: Tensor, steps: Tensor) -> Tensor:
    """Return ln a = −e^A_log · softplus(steps); the last axis of ``steps`` is that of A_log."""
    return -at_least_float32(a_log).exp() * F.softplus(steps)
