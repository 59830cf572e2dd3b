"""Attention whose weights are written out, N² numbers a head, is the base that `sigmoid` and `fox` share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stability.mechanisms._attention import AbstractDotProductAttention, visible_pairs
from stability.mechanisms._base import MixerShape, without_padding
from stability.models.position import Rope
from stability.models.precision import at_least_float32


class AbstractWrittenOutAttention(AbstractDotProductAttention):
    """Attention of a sequence to itself by weights A that a subclass writes out, `weighed`; ``qkv`` gives queries, keys
    and values.

    Torch's fused attention knows no other weights than a softmax's, and under autocast it rounds what is added to the
    logits to bfloat16; here A is made in float32 or wider. In training mode a share of A is dropped, which `weights`
    leaves out. ``rope``: the rotation of queries and keys; None: they are compared as they are.
    """

    def __init__(self, config: Any, shape: MixerShape, rope: Rope | None):
        super().__init__(config, replace(shape, rope=rope))

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, which under RoPE score near pairs higher than far ones; nothing without it."""
        if self.rope is not None:
            super().start_local(bias)

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return num_positions**2  # what no position sees is computed like the rest

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        a_BHNN = self.weighed(self.logits(q_BHNK, k_BHNK), x_BND, mask_BN)
        if self.dropped:
            a_BHNN = F.dropout(a_BHNN, self.dropped)
        return self.joined(self.mixed(a_BHNN.to(v_BHNK.dtype), v_BHNK), x_BND)

    def weighed(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        """Return A from the `logits` of all pairs and from x, which is zero at padding: 0 where a position does not see
        another one."""
        raise NotImplementedError

    def logits(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Float[Tensor, "B H N N"]:
        """Return q̃_i·k̃_j / √K of all pairs, float32 or wider."""
        return at_least_float32(q_BHNK @ k_BHNK.mT) / math.sqrt(q_BHNK.shape[-1])

    def seen(self, x_BND: Tensor, mask_BN: Tensor | None) -> Bool[Tensor, "B 1 N N"]:
        """Return the pairs, True where a query (third axis) sees a key (fourth): a valid one, j ≤ i where causal."""
        return visible_pairs(x_BND.shape[1], mask_BN, causal=self.causal, mask_diagonal=False, device=x_BND.device)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, _ = self.split(self.qkv(x_BND))
        return self.weighed(self.logits(q_BHNK, k_BHNK), x_BND, mask_BN)
