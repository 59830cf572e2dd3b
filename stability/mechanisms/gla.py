"""`gla`: gated linear attention (Yang et al. 2024, arXiv:2312.06635)."""

from __future__ import annotations

from typing import Annotated, Any

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import ImplOrFla, Use
from stability.mechanisms._base import MixerShape
from stability.mechanisms._decayed import share_of_head, split_heads
from stability.mechanisms._gated_decay import AbstractGatedDecay
from stability.mechanisms._recurrent import ShortConvolution
from stability.models.passes import at_least_float32, in_float32


class GatedLinearAttention(AbstractGatedDecay):
    """Linear attention with input-dependent decay: S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ per head.

    o_t = S_tᵀ q_t / √K (eq. 3 with β = 1) and y = W_o (swish(W_r x + b_r) ⊙ RMSNorm(o)) + b_o (section 4.4). α_t = σ(W₂
    W₁ x_t + b)^(1/τ) has one entry per key feature, from a map of rank 16, τ = 16. b is initially 0, so the state keeps
    0.96 per position. Queries and keys are half as wide as the model, so there are 4 D² parameters besides the gates'.
    Nothing is rotated under any position scheme. The norm is per head, with one weight per feature, as in the
    authors' released code. At padding α = 1 and v = 0.

    With ``conv``, queries, keys and values are silu(conv(W x + b)), each feature convolved along positions, as in
    `deltanet` and in flash-linear-attention's layer with ``use_short_conv`` (fla/layers/gla.py). The paper has no
    convolution.
    """

    class Config(Settings):
        """Settings for widths, decay and implementation."""

        expand_k: float = Field(
            default=0.5, gt=0, le=16, description="width of queries and keys, in widths of the model"
        )
        expand_v: float = Field(default=1.0, gt=0, le=16, description="width of the values, in widths of the model")
        gate_rank: int = Field(default=16, ge=1, description="rank of the map from x to the decays")
        gate_divisor: float = Field(
            default=16.0, gt=0, description="τ of α = σ(·)^(1/τ): the larger, the longer the state keeps what it has"
        )
        conv: Annotated[int | None, Since(None)] = Field(
            default=None, ge=1, description="positions that short convolutions of q, k and v read; null: there are none"
        )
        chunk: int = Field(default=8, ge=1, description="positions computed at once; 1: the recurrence")
        impl: ImplOrFla = "reference"

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape, centred=False)
        self.divisor = config.gate_divisor
        self.conv = None if config.conv is None else ShortConvolution(sum(self.widths[:3]), config.conv)
        self.forget_down = nn.Linear(shape.width, config.gate_rank, bias=False)
        self.forget = nn.Linear(config.gate_rank, self.widths[1])
        nn.init.zeros_(self.forget.bias)

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"forget.bias"})

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on gate biases: it would pull memory to that of σ = ½."""
        return {"forget.bias": False}

    @classmethod
    def head_widths(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        return share_of_head(config.expand_k, shape), share_of_head(config.expand_v, shape)

    @classmethod
    def width_of_keys(cls, config: Any, use: Use) -> int:
        return share_of_head(config.expand_k, use)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the decays' map and the convolutions in addition to the rest.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        of_keys = shape.heads * share_of_head(config.expand_k, shape)
        gates = config.gate_rank * (shape.width + of_keys)
        convolved = min(config.conv or 0, num_positions) * cls._num_convolved(config, shape)
        return super().cost(config, shape, num_positions) + num_positions * (gates + convolved)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of the heads' states and the convolutions' last inputs.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        held = 0 if config.conv is None else (config.conv - 1) * cls._num_convolved(config, shape)
        return super().state_size(config, shape, num_positions) + held

    @classmethod
    def _num_convolved(cls, config: Any, shape: MixerShape) -> int:
        """Return the total width of queries, keys and values."""
        keys, values = cls.head_widths(config, shape)
        return shape.heads * (2 * keys + values)

    def project(self, x_BND: Tensor, mask_BN: Tensor | None) -> tuple[Tensor, ...]:
        if self.conv is None:
            return super().project(x_BND, mask_BN)
        qkv_BND, g_BND = self.qkvg(x_BND).split((sum(self.widths[:3]), self.widths[3]), -1)
        return *F.silu(self.conv(qkv_BND, mask_BN=mask_BN)).split(self.widths[:3], -1), g_BND

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        """Return ln α, in float32 or wider."""
        with in_float32(x_BND.device):
            score_BND = self.forget(self.forget_down(at_least_float32(x_BND)))
            return split_heads(F.logsigmoid(score_BND) / self.divisor, self.heads)


EXPORT = GatedLinearAttention
