"""Softmax attention over the pairs of positions that see each other, which `sa` and `attentionx` share where the diagonal is masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def visible_pairs(num_positions: int, mask_BN: Tensor | None, *, causal: bool, mask_diagonal: bool, device: torch.device) -> Bool[Tensor, "B 1 N N"]:
    """The pairs are True where a query (third axis) sees a key (fourth): a valid one, j ≤ i where causal, j ≠ i with a masked diagonal. B is 1 without
    padding."""
    visible_NN = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device)
    visible_NN = visible_NN.tril() if causal else visible_NN
    if mask_diagonal:
        visible_NN = visible_NN & ~torch.eye(num_positions, dtype=torch.bool, device=device)
    return visible_NN[None, None] if mask_BN is None else visible_NN & mask_BN[:, None, None]


def attended(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, visible: Tensor) -> Float[Tensor, "B H N K"]:
    """The result is softmax(q̃k̃ᵀ/√K) v over the visible keys by torch's scaled_dot_product_attention, and zero, the empty sum, in rows that see nothing."""
    empty = ~visible.any(-1, keepdim=True)
    # Softmaxes that are not torch's give NaN for an empty row: it sees everything, and what comes of it is dropped.
    attended_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=visible | empty)
    return attended_BHNK.masked_fill(empty, 0.0)
