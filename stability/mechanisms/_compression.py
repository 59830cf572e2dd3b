"""Compress blocks, possibly overlapping, into one vector each; compute their visibility."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn


def blocks_of(x_BGNK: Tensor, length: int, stride: int) -> Float[Tensor, "B G C L K"]:
    """Return the blocks of ``length`` positions, one start per ``stride``, inside the sequence.

    A sequence shorter than one block gives one zero-padded, never complete block.

    Args:
        x_BGNK: (B, G, N, K).
        length: L, positions per block.
        stride: distance between starts.
    """
    missing = max(0, length - x_BGNK.shape[2])
    return F.pad(x_BGNK, (0, 0, 0, missing)).unfold(2, length, stride).mT


def last_positions(num_positions: int, length: int, stride: int, device: torch.device) -> Int64[Tensor, " C"]:
    """Return the position at which each block from `blocks_of` is complete.

    Args:
        num_positions: N.
        length: positions per block.
        stride: distance between starts.
        device: device for the result.
    """
    num_blocks = max(0, num_positions - length) // stride + 1
    return torch.arange(num_blocks, device=device) * stride + length - 1


def complete_blocks(
    num_positions: int, length: int, stride: int, mask_BN: Tensor | None, device: torch.device
) -> Bool[Tensor, "B 1 N C"]:
    """Return True if a block (fourth axis) is complete at a position (third).

    A complete block ends there or before, and has no padding.

    Args:
        num_positions: N.
        length: positions per block.
        stride: distance between starts.
        mask_BN: True at valid positions; None without padding.
        device: device for the result.

    Returns:
        (B, 1, N, C) booleans; B is 1 without padding.
    """
    last_C = last_positions(num_positions, length, stride, device)
    seen_NC = last_C <= torch.arange(num_positions, device=device)[:, None]
    if mask_BN is None:
        return seen_NC[None, None]
    whole_BC = F.pad(mask_BN, (0, max(0, length - num_positions))).unfold(1, length, stride).all(-1)
    return seen_NC & whole_BC[:, None, None]


class MeanOfBlocks(nn.Module):
    """Mean over each block, (B, G, C, L, K) → (B, G, C, K)."""

    def forward(self, blocks_BGCLK: Float[Tensor, "B G C L K"]) -> Float[Tensor, "B G C K"]:
        return blocks_BGCLK.mean(-2)


class LearnedCompression(nn.Module):
    """Learned compression, φ(x) = W₂ gelu(W₁ [x_1 + e_1; …; x_L + e_L] + b₁).

    W₁ (K, LK), b₁ and W₂ (K, K) are shared by all heads. e is the learned embedding for the place in a block, one per
    head, initially 0. W₂ has no bias: a constant for all blocks does not change a softmax over compressed keys.
    """

    def __init__(self, kv_heads: int, length: int, head_width: int):
        super().__init__()
        self.place_GLK = nn.Parameter(torch.zeros(kv_heads, length, head_width))
        self.hidden = nn.Linear(length * head_width, head_width)
        self.compressed = nn.Linear(head_width, head_width, bias=False)

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on the embeddings for the place in a block."""
        return {"place_GLK": False}

    def forward(self, blocks_BGCLK: Float[Tensor, "B G C L K"]) -> Float[Tensor, "B G C K"]:
        placed_BGCLK = blocks_BGCLK + self.place_GLK[:, None]
        return self.compressed(F.gelu(self.hidden(placed_BGCLK.flatten(-2))))
