"""`sigmoid`: attention with sigmoid weights, not normalised (Ramapuram et al. 2024, arXiv:2409.04431)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape
from stability.mechanisms._written_out import AbstractWrittenOutAttention
from stability.models.precision import at_least_float32


class SigmoidAttention(AbstractWrittenOutAttention):
    """Attention without softmax: y_i = W_o Σ_j σ(q̃_i·k̃_j / √K + b) v_j + b_o, b = −ln n, per head.

    From the paper's section 2. RoPE on q and k; j ≤ i if causal. Masked pairs have weight 0; rows are not normalised.
    With b = −ln n the weights of n positions with score 0 sum to n/(n + 1), about 1 as for a softmax; without b, to
    n/2.

    n is the model's training length (`model.positions`), a constant as in the paper. So a causal position's output does
    not depend on the final sequence length. If that length is unknown (a layer built by hand, a tokenizer's), n is each
    sequence's number of valid positions, so that padding changes nothing. ``norm="after"`` is the hybrid norm needed by
    the paper's longer language models, W_o norm(AV): a root mean square norm over all heads together. ``qk_norm`` is a
    LayerNorm on each head's q and k before rotation, with scales shared by heads.
    """

    class Config(Settings):
        """Settings for the bias and the norms."""

        length: int | None = Field(
            default=None, ge=1, description="n of the bias −ln n; null: the sequence length that the model is made for"
        )
        norm: Literal["none", "after"] = Field(
            default="none", description="root mean square norm of what the heads give, before the output map, or none"
        )
        qk_norm: bool = Field(default=False, description="whether each head's queries and keys are normed (LayerNorm)")

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    rows_sum_to_one = False

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape, shape.rope)
        self.length = shape.num_positions if config.length is None else config.length
        self.norm = nn.RMSNorm(shape.width, eps=1e-5) if config.norm == "after" else None
        self.q_norm, self.k_norm = (nn.LayerNorm(shape.head_width) if config.qk_norm else None for _ in range(2))

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as in the base class.

        With ``qk_norm`` queries and keys are normed by head before rotation.
        """
        if self.q_norm is not None and self.k_norm is not None:
            q_BNHK, k_BNHK, v_BNHK = qkv_BND.unflatten(-1, (3, self.heads, -1)).unbind(2)
            qkv_BND = torch.cat([self.q_norm(q_BNHK), self.k_norm(k_BNHK), v_BNHK], 2).flatten(2)
        return super().split(qkv_BND)

    def weigh(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        a_BHNN = (logits_BHNN + self.bias(x_BND, mask_BN)).sigmoid()
        return a_BHNN.masked_fill(~self.find_visible(x_BND, mask_BN), 0.0)

    def bias(self, x_BND: Tensor, mask_BN: Tensor | None) -> float | Float[Tensor, "B 1 1 1"]:
        """Return b = −ln n."""
        if self.length is not None or mask_BN is None:
            return -math.log(self.length or x_BND.shape[1])
        valid_B = mask_BN.sum(-1).clamp_min(1)
        return -at_least_float32(valid_B.to(x_BND.dtype)).log()[:, None, None, None]

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the concatenated heads, normed with ``norm="after"``, through W_o."""
        y_BND = y_BHNK.transpose(1, 2).flatten(2)
        return self.out(y_BND if self.norm is None else self.norm(at_least_float32(y_BND)))


EXPORT = SigmoidAttention
