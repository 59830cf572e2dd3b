"""Attention whose weights are written out, N² numbers a head, is the base that `sigmoid` and `fox` share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stability.mechanisms._attention import visible_pairs
from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._observed import AbstractAttention
from stability.models.position import Rope
from stability.models.precision import at_least_float32


class AbstractWrittenOutAttention(AbstractAttention):
    """Attention of a sequence to itself by weights A that a subclass writes out, `weighed`; ``qkv`` gives queries, keys
    and values.

    Torch's fused attention knows no other weights than a softmax's, and under autocast it rounds what is added to the
    logits to bfloat16; here A is made in float32 or wider. In training mode a share of A is dropped, which `weights`
    leaves out. ``rope``: the rotation of queries and keys; None: they are compared as they are.
    """

    def __init__(self, shape: MixerShape, rope: Rope | None):
        super().__init__()
        if rope is not None:
            shape.require_pairs()
        self.rope, self.heads, self.causal, self.dropout = rope, shape.heads, shape.direction == CAUSAL, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` holds three matrices, those of queries, keys and values."""
        return {"qkv": (self.qkv.in_features,) * 3}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, which under RoPE score near pairs higher than far ones; nothing without it."""
        if self.rope is not None:
            self.qkv.bias[: 2 * self.qkv.in_features] = bias

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the four projections of D², and two products of D for each of N² pairs: what no position sees is
        computed like the rest."""
        return float(4 * num_positions * shape.width**2 + 2 * num_positions**2 * shape.width)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        a_BHNN = self.weighed(self.logits(q_BHNK, k_BHNK), x_BND, mask_BN)
        if self.training and self.dropout:
            a_BHNN = F.dropout(a_BHNN, self.dropout)
        return self.joined(self.mixed(a_BHNN.to(v_BHNK.dtype), v_BHNK), x_BND)

    def weighed(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        """Return A from the `logits` of all pairs and from x, which is zero at padding: 0 where a position does not see
        another one."""
        raise NotImplementedError

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated where ``rope`` says so, and values, (B, H, N, K) each, from what ``qkv``
        gives."""
        q_BNHK, k_BNHK, v_BNHK = qkv_BND.unflatten(-1, (3, self.heads, -1)).unbind(2)
        q_BNHK, k_BNHK = self.compared(q_BNHK, k_BNHK)
        if self.rope is not None:
            q_BNHK, k_BNHK = self.rope(q_BNHK, position_dim=1), self.rope(k_BNHK, position_dim=1)
        return q_BNHK.transpose(1, 2), k_BNHK.transpose(1, 2), v_BNHK.transpose(1, 2)

    def compared(self, q_BNHK: Tensor, k_BNHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is rotated and compared in the place of queries and keys: themselves."""
        return q_BNHK, k_BNHK

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

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        return self.split(self.qkv(x_BND))[2]
