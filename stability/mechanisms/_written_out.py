"""Base class for `sigmoid` and `fox`: attention with explicit weights, N² numbers per head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stability.mechanisms._attention import AbstractDotProductAttention, cap, visible_pairs
from stability.mechanisms._base import MixerShape, without_padding
from stability.models.passes import at_least_float32
from stability.models.position import Rope


class AbstractWrittenOutAttention(AbstractDotProductAttention):
    """Self-attention with explicit weights A, defined by a subclass in `weigh`.

    ``qkv`` projects to queries, keys and values. Torch's fused attention supports softmax weights only, and under
    autocast rounds additions to the logits to bfloat16; here A is in float32 or wider. Dropout on A applies in training
    mode only, and never in `weights`. ``rope``: rotation of queries and keys, or None.
    """

    def __init__(self, config: Any, shape: MixerShape, rope: Rope | None):
        super().__init__(config, replace(shape, rope=rope))

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, so that near pairs score higher under RoPE.

        No effect without RoPE.
        """
        if self.rope is not None:
            super().start_local(bias)

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return num_positions**2  # invisible pairs are computed too

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        a_BHNN = self.weigh(self.logits(q_BHNK, k_BHNK), x_BND, mask_BN)
        if self.dropped:
            a_BHNN = F.dropout(a_BHNN, self.dropped)
        return self.joined(self.mixed(a_BHNN.to(v_BHNK.dtype), v_BHNK), x_BND)

    def weigh(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        """Return A, 0 at invisible pairs.

        Args:
            logits_BHNN: `logits` of all pairs.
            x_BND: the layer's input, zero at padding.
            mask_BN: True at valid positions; None without padding.
        """
        raise NotImplementedError

    def logits(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Float[Tensor, "B H N N"]:
        """Return q̃_i·k̃_j / √K for all pairs, in float32 or wider, capped with ``softcap``."""
        return cap(at_least_float32(q_BHNK @ k_BHNK.mT) / math.sqrt(q_BHNK.shape[-1]), self.softcap)

    def find_visible(self, x_BND: Tensor, mask_BN: Tensor | None) -> Bool[Tensor, "B 1 N N"]:
        """Return the visible pairs: True if a query (third axis) sees a key (fourth).

        A visible key is valid, and j ≤ i if causal.
        """
        return visible_pairs(x_BND.shape[1], mask_BN, causal=self.causal, mask_diagonal=False, device=x_BND.device)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, _ = self.split(self.qkv(x_BND))
        return self.weigh(self.logits(q_BHNK, k_BHNK), x_BND, mask_BN)
