"""Softmax attention with rotary positions is the base of `sa`, `sw`, `attentionx` and others."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._impl import Use
from stability.mechanisms._observed import AbstractAttention

WIDEST_HEAD = 128  # of kernels.band_attention


class AbstractDotProductAttention(AbstractAttention):
    """Attention that scores pairs by `logits`, q̃·k̃ / √K; ``qkv`` gives queries, keys and values.

    ``gamma``: γ of the discrepancy v − γAv where the heads pass that on, one number; None: they pass on Av.
    ``mask_diagonal``: whether no position sees itself. ``log_temperature``: t, where the products q·k have a learned
    factor e^t in the place of 1/√K (Lee et al. 2021, arXiv:2112.13492, 3.2); None: they have not. A subclass implements
    `forward` by torch's own attention, and `visible` where it is another than j ≤ i (causal) or all; `weights` writes
    the same softmax out, N² numbers a head. In training mode a share of A is dropped, `dropped`, which `weights` leaves
    out. One whose `split`, `logits` or `mixed` is another also says so: in `projections`, in ``gamma``.

    ``kv_heads``: heads of keys and values, fewer than those of queries where queries are grouped (Ainslie et al. 2023,
    arXiv:2305.13245): query head h then reads keys and values h // (heads / kv_heads), and ``qkv`` has the rows of
    D + 2·kv_heads·K. Whatever is exposed has all heads.
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
        self.kv_heads = self.kv_heads_of(config, shape.heads)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * self.kv_heads * shape.head_width)
        self.out = nn.Linear(shape.width, shape.width)
        # not of the class: a parameter of that name could not be registered
        self.gamma = self.log_temperature = None

    @classmethod
    def kv_heads_of(cls, config: Any, heads: int) -> int:
        """Return how many heads keys and values have: as many as queries, unless a mechanism groups these."""
        return heads

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
        of_queries = self.qkv.in_features
        of_keys = (self.qkv.out_features - of_queries) // 2
        return {"qkv": (of_queries, of_keys, of_keys)}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k: under RoPE they give every pair the score b²·Σ_k cos θ_k(i − j) / √K, which
        falls off with distance."""
        of_values = self.own_splits["qkv"][-1]
        self.qkv.bias[:-of_values] = bias

    @property
    def dropped(self) -> float:
        """The share of attention weights that a forward pass drops now: none outside of training mode."""
        return self.dropout if self.training else 0.0

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int | float:
        """Return how many pairs (query, key) of a sequence are computed; a masked diagonal is computed like the
        rest."""
        return num_positions * (num_positions + 1) // 2 if shape.direction == CAUSAL else num_positions**2

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, four of D² where queries are not grouped, and two products of D for each pair."""
        pairs = cls.num_pairs(config, shape, num_positions)
        of_keys = cls.kv_heads_of(config, shape.heads) * shape.head_width
        projections = 2 * num_positions * shape.width * (shape.width + of_keys)
        return float(projections + 2 * pairs * shape.width)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return cls.kv_heads_of(config, shape.heads) * num_positions

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N N"]:
        """Return the pairs (N, N), True where query i (first axis) sees key j in a sequence without padding; (H, N, N)
        where heads see different ones."""
        causal, mask_diagonal = self.causal, self.mask_diagonal
        return visible_pairs(num_positions, None, causal=causal, mask_diagonal=mask_diagonal, device=device)[0, 0]

    def projections(self) -> tuple[Float[Tensor, "H K D"], Float[Tensor, "H K D"]]:
        """Return each head's W_q and W_k: with neither rotation nor biases the logits are (W_q x)·(W_k x′) times e^t,
        where that is learned, or 1/√K."""
        of_heads_SKD = self.qkv.weight.unflatten(0, (self.heads + 2 * self.kv_heads, -1))
        w_q_HKD, w_k_GKD, _ = of_heads_SKD.split((self.heads, self.kv_heads, self.kv_heads))
        return w_q_HKD, self._of_each_query_head(w_k_GKD, 0)

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated where the run's positions are rotations, and values, (B, H, N, K) each, from
        what ``qkv`` gives; queries times √K·e^t where the temperature is learned: `logits` has the factor 1/√K."""
        qkv_BNSK = qkv_BND.unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        qk_BNSK, v_BNGK = qkv_BNSK.split((self.heads + self.kv_heads, self.kv_heads), 2)
        turned = qk_BNSK if self.rope is None else self.rope(qk_BNSK, position_dim=1)
        q_BHNK, k_BGNK = (part.transpose(1, 2) for part in turned.split((self.heads, self.kv_heads), 2))
        if self.log_temperature is not None:
            q_BHNK = q_BHNK * (self.log_temperature.exp() * math.sqrt(q_BHNK.shape[-1]))
        return q_BHNK, self._of_each_query_head(k_BGNK, 1), self._of_each_query_head(v_BNGK.transpose(1, 2), 1)

    def _of_each_query_head(self, of_kv_heads: Tensor, dim: int) -> Tensor:
        """Return what each head of queries reads of the heads of keys or values, which are counted along ``dim``."""
        group = self.heads // self.kv_heads
        return of_kv_heads if group == 1 else of_kv_heads.repeat_interleave(group, dim)

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


def require_groups(mechanism: str, kv_heads: int | None, heads: int) -> None:
    """Raise a ``ValueError`` of one line where so many heads of keys and values cannot be shared out among the heads of
    queries. ``mechanism``: whose setting it is."""
    if kv_heads is not None and heads % kv_heads:
        choices = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"mechanism.{mechanism}.kv_heads={kv_heads} does not divide heads={heads}; choices: {choices}, null"
        )


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


def beyond_the_band_kernels(use: Use) -> str | None:
    """Return what `kernels.band_attention` does not compute of an attention on a band; None where it computes all."""
    if use.dropout > 0:
        return f"dropout of an attention's weights, {use.dropout:g}"
    return f"heads of width {use.head_width} > {WIDEST_HEAD}" if use.head_width > WIDEST_HEAD else None


def attended(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, visible: Tensor, dropped: float = 0.0
) -> Float[Tensor, "... N K"]:
    """Return softmax(q̃k̃ᵀ/√K) v over the visible keys by torch's scaled_dot_product_attention, and zero, the empty
    sum, in rows that see nothing. ``dropped``: the share of the softmax's weights that is dropped."""
    empty = ~visible.any(-1, keepdim=True)
    # Softmaxes that are not torch's give NaN for an empty row: it sees everything, and what comes of it is dropped.
    attended_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=visible | empty, dropout_p=dropped)
    return attended_BHNK.masked_fill(empty, 0.0)
