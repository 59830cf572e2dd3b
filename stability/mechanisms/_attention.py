"""Attention by products of queries and keys with rotary positions is the base that `sa`, `sw` and `attentionx`
share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._observed import AbstractAttention


class AbstractDotProductAttention(AbstractAttention):
    """Attention that scores pairs by `logits`, q̃·k̃ / √K; ``qkv`` gives queries, keys and values.

    ``gamma``: γ of the discrepancy v − γAv where the heads pass that on, one number; None: they pass on Av.
    ``mask_diagonal``: whether no position sees itself. ``log_temperature``: t, where the products q·k have a learned
    factor e^t in the place of 1/√K (Lee et al. 2021, arXiv:2112.13492, 3.2); None: they have not. A subclass implements
    `forward` by torch's own attention, and `visible` where it is another than j ≤ i (causal) or all; `weights` writes
    the same softmax out, N² numbers a head. In training mode a share of A is dropped, `dropped`, which `weights` leaves
    out. One whose `split`, `logits` or `mixed` is another also says so: in `projections`, in ``gamma``.
    """

    rows_sum_to_one = True
    gamma: float | Tensor | None
    mask_diagonal: bool = False
    log_temperature: nn.Parameter | None

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        if shape.rope is not None:
            shape.require_pairs()
        self.rope, self.heads, self.causal = shape.rope, shape.heads, shape.direction == CAUSAL
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        # not of the class: a parameter of that name could not be registered
        self.gamma = self.log_temperature = None

    def learn_temperature(self) -> None:
        """Let the factor of the products q·k be learned, one for all heads, from 1/√K on."""
        head_width = self.out.in_features // self.heads
        self.log_temperature = nn.Parameter(torch.full((1,), -0.5 * math.log(head_width)))

    @property
    def own_decay(self) -> dict[str, bool]:
        """The learned factor is kept from weight decay, which would draw it to 1."""
        return {} if self.log_temperature is None else {"log_temperature": False}

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` holds three matrices, those of queries, keys and values."""
        return {"qkv": (self.qkv.in_features,) * 3}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k: under RoPE they give every pair the score b²·Σ_k cos θ_k(i − j) / √K, which
        falls off with distance."""
        self.qkv.bias[: 2 * self.qkv.in_features] = bias

    @property
    def dropped(self) -> float:
        """The share of attention weights that a forward pass drops now: none outside of training mode."""
        return self.dropout if self.training else 0.0

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return how many pairs (query, key) of a sequence are computed; a masked diagonal is computed like the
        rest."""
        return num_positions * (num_positions + 1) // 2 if shape.direction == CAUSAL else num_positions**2

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the four projections of D², and two products of D for each pair."""
        pairs = cls.num_pairs(config, shape, num_positions)
        return float(4 * num_positions * shape.width**2 + 2 * pairs * shape.width)

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N N"]:
        """Return the pairs (N, N), True where query i (first axis) sees key j in a sequence without padding."""
        causal, mask_diagonal = self.causal, self.mask_diagonal
        return visible_pairs(num_positions, None, causal=causal, mask_diagonal=mask_diagonal, device=device)[0, 0]

    def projections(self) -> tuple[Float[Tensor, "H K D"], Float[Tensor, "H K D"]]:
        """Return each head's W_q and W_k: with neither rotation nor biases the logits are (W_q x)·(W_k x′) times e^t,
        where that is learned, or 1/√K."""
        w_q_HKD, w_k_HKD, _ = self.qkv.weight.unflatten(0, (3, self.heads, -1))
        return w_q_HKD, w_k_HKD

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated where the run's positions are rotations, and values, (B, H, N, K) each, from
        what ``qkv`` gives; queries times √K·e^t where the temperature is learned: `logits` has the factor 1/√K."""
        qkv_BNTHK = qkv_BND.unflatten(-1, (3, self.heads, -1))
        qk_BNTHK = qkv_BNTHK[:, :, :2]
        turned = qk_BNTHK if self.rope is None else self.rope(qk_BNTHK, position_dim=1)
        q_BHNK, k_BHNK = (part.transpose(1, 2) for part in turned.unbind(2))
        if self.log_temperature is not None:
            q_BHNK = q_BHNK * (self.log_temperature.exp() * math.sqrt(q_BHNK.shape[-1]))
        return q_BHNK, k_BHNK, qkv_BNTHK[:, :, 2].transpose(1, 2)

    def logits(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Float[Tensor, "... N N"]:
        """Return q̃_i·k̃_j / √K of all pairs, seen or not, of queries and keys as `split` gives them."""
        return q_BHNK @ k_BHNK.mT / math.sqrt(q_BHNK.shape[-1])

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        return self.split(self.qkv(x_BND))[2]


class AbstractSoftmaxAttention(AbstractDotProductAttention):
    """Attention with A = softmax(`logits`) over the keys that a position sees, which are the same whatever x is."""

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        visible = self.visible(x_BND.shape[1], x_BND.device)
        if mask_BN is not None:
            visible = visible & mask_BN[:, None, None]
        return self.logits(q_BHNK, k_BHNK).masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible, 0.0)


def visible_pairs(
    num_positions: int, mask_BN: Tensor | None, *, causal: bool, mask_diagonal: bool, device: torch.device
) -> Bool[Tensor, "B 1 N N"]:
    """Return the pairs, True where a query (third axis) sees a key (fourth): a valid one, j ≤ i where causal, j ≠ i
    with a masked diagonal. B is 1 without padding."""
    visible_NN = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device)
    visible_NN = visible_NN.tril() if causal else visible_NN
    if mask_diagonal:
        visible_NN = visible_NN & ~torch.eye(num_positions, dtype=torch.bool, device=device)
    return visible_NN[None, None] if mask_BN is None else visible_NN & mask_BN[:, None, None]


def attended(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, visible: Tensor, dropped: float = 0.0
) -> Float[Tensor, "B H N K"]:
    """Return softmax(q̃k̃ᵀ/√K) v over the visible keys by torch's scaled_dot_product_attention, and zero, the empty
    sum, in rows that see nothing. ``dropped``: the share of the softmax's weights that is dropped."""
    empty = ~visible.any(-1, keepdim=True)
    # Softmaxes that are not torch's give NaN for an empty row: it sees everything, and what comes of it is dropped.
    attended_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=visible | empty, dropout_p=dropped)
    return attended_BHNK.masked_fill(empty, 0.0)
