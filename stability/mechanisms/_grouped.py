"""Causal softmax attention of groups of heads to blocks that each position chooses, and to a sliding window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stability.mechanisms._attention import attended

# Queries of the window are taken in blocks of at least this many, as in `sw`.
MIN_BLOCK = 16


def over_blocks(
    q_BGRNK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    chosen_BGNS: Tensor,
    is_chosen_BGNS: Tensor,
    length: int,
    mask_BN: Tensor | None,
    dropped: float,
) -> Float[Tensor, "B G R N K"]:
    """Return what each query takes from the valid positions up to its own of the blocks that its group chose.

    ``chosen_BGNS``: the numbers of blocks of ``length`` positions, of which those count that ``is_chosen_BGNS`` says.
    Keys and values are gathered: S·length of each for each position and group. ``dropped``: the share of weights that
    is dropped.
    """
    batch, groups, num_positions, _ = k_BGNK.shape
    num_blocks = -(-num_positions // length)
    fill = num_blocks * length - num_positions
    rows = torch.arange(batch * groups, device=k_BGNK.device).view(batch, groups, 1, 1) * num_blocks
    k_BGNJK, v_BGNJK = (
        F.pad(part, (0, 0, 0, fill))
        .reshape(batch * groups * num_blocks, -1)
        .index_select(0, (rows + chosen_BGNS).flatten())
        .view(batch, groups, num_positions, -1, part.shape[-1])
        for part in (k_BGNK, v_BGNK)
    )
    key_BGNJ = (chosen_BGNS[..., None] * length + torch.arange(length, device=k_BGNK.device)).flatten(-2)
    query_N1 = torch.arange(num_positions, device=k_BGNK.device)[:, None]
    visible = is_chosen_BGNS.repeat_interleave(length, -1) & (key_BGNJ <= query_N1)
    if mask_BN is not None:
        visible = visible & F.pad(mask_BN, (0, fill)).gather(1, key_BGNJ.flatten(1)).view_as(visible)
    return attended(q_BGRNK.transpose(2, 3), k_BGNJK, v_BGNJK, visible[..., None, :], dropped).transpose(2, 3)


def over_window(
    q_BGRNK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, window: int, mask_BN: Tensor | None, dropped: float
) -> Float[Tensor, "B G R N K"]:
    """Return what each query i takes from the valid keys i − window ≤ j ≤ i of its group, in blocks of queries, each of
    which sees its band."""
    num_positions, group = k_BGNK.shape[2], q_BGRNK.shape[2]
    block = window_block(window, num_positions)
    num_blocks = -(-num_positions // block)
    fill = num_blocks * block - num_positions
    q_BGMRCK = F.pad(q_BGRNK, (0, 0, 0, fill)).unflatten(3, (num_blocks, block)).transpose(2, 3)
    k_BGMJK, v_BGMJK = (
        F.pad(part, (0, 0, window, fill)).unfold(2, window + block, block).mT for part in (k_BGNK, v_BGNK)
    )
    query_MC1 = torch.arange(num_blocks * block, device=k_BGNK.device).view(num_blocks, block, 1)
    key_M1J = query_MC1[:, :1] - window + torch.arange(window + block, device=k_BGNK.device)
    visible = (key_M1J >= query_MC1 - window) & (key_M1J <= query_MC1) & (key_M1J >= 0) & (key_M1J < num_positions)
    if mask_BN is not None:
        visible = (visible & mask_BN[:, key_M1J.clamp(0, num_positions - 1)])[:, None]
    of_group = visible.repeat(*(1,) * (visible.ndim - 2), group, 1)  # the group's queries stand one below the other
    y_BGMQK = attended(q_BGMRCK.flatten(3, 4), k_BGMJK, v_BGMJK, of_group, dropped)
    return y_BGMQK.unflatten(3, (group, block)).transpose(2, 3).flatten(3, 4)[:, :, :, :num_positions]


def window_block(window: int, num_positions: int) -> int:
    """Return how many queries `over_window` takes at once."""
    return min(max(window, MIN_BLOCK), num_positions)
