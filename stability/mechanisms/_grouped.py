"""Causal grouped softmax attention to chosen blocks and to a sliding window."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stability.mechanisms._attention import attend
from stability.models.passes import at_least_float32

# smallest block of queries in the window, as in `sw`
MIN_BLOCK = 16


def attend_blocks(
    q_BGRNK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    chosen_BGNS: Tensor,
    is_chosen_BGNS: Tensor,
    length: int,
    mask_BN: Tensor | None,
    dropped: float,
) -> Float[Tensor, "B G R N K"]:
    """Return attention to the first, own and previous block, and to chosen blocks.

    Only valid positions up to the query's own count.

    Args:
        q_BGRNK: queries, R per group.
        k_BGNK: keys.
        v_BGNK: values.
        chosen_BGNS: block numbers per position and group, none among the first, own and previous block.
        is_chosen_BGNS: False at entries of ``chosen_BGNS`` to ignore.
        length: L, positions per block.
        mask_BN: True at valid positions; None without padding.
        dropped: dropout rate on weights.
    """
    # chosen blocks are gathered, S·L keys and values per position and group; all queries of a block share the others
    num_positions = k_BGNK.shape[2]
    length = min(length, num_positions)
    num_blocks = -(-num_positions // length)
    fill = num_blocks * length - num_positions
    q_BGRMLK, k_BGMLK, v_BGMLK = (
        F.pad(part, (0, 0, 0, fill)).unflatten(-2, (num_blocks, length)) for part in (q_BGRNK, k_BGNK, v_BGNK)
    )
    chosen, is_chosen = (F.pad(part, (0, 0, 0, fill)) for part in (chosen_BGNS, is_chosen_BGNS))
    valid = None if mask_BN is None else F.pad(mask_BN, (0, fill))
    visible = _visible_in_blocks(chosen, is_chosen, length, valid)[:, :, None]
    near = [(part[:, :, None, :1], _prepend_previous_block(part)[:, :, None]) for part in (k_BGMLK, v_BGMLK)]
    scaled = q_BGRMLK / math.sqrt(q_BGRMLK.shape[-1])
    logits = [scaled @ k.mT for k in near[0]]
    if chosen.shape[-1]:
        logits.append(_multiply_each(scaled, _gather_blocks(k_BGMLK, chosen).mT))
    a = masked_softmax(torch.cat(logits, -1), visible)
    a_first, a_near, a_free = F.dropout(a, dropped).split((length, 2 * length, visible.shape[-1] - 3 * length), -1)
    y = a_first @ near[1][0] + a_near @ near[1][1]
    if chosen.shape[-1]:
        y = y + _multiply_each(a_free, _gather_blocks(v_BGMLK, chosen))
    return y.flatten(3, 4)[:, :, :, :num_positions]


def _visible_in_blocks(
    chosen_BGNS: Tensor, is_chosen_BGNS: Tensor, length: int, mask_BN: Tensor | None
) -> Bool[Tensor, "B G M L J"]:
    """Return True if a query sees a key: first block, previous, own, chosen.

    If the first block is also the previous or own one, it is visible only as that. N is a multiple of ``length`` here.
    """
    device, num_blocks = chosen_BGNS.device, chosen_BGNS.shape[2] // length
    query_ML1 = torch.arange(num_blocks * length, device=device).view(num_blocks, length, 1)
    in_block_L = torch.arange(length, device=device)
    near_M1J = query_ML1[:, :1] - length + torch.arange(2 * length, device=device)
    is_first = (query_ML1 >= 2 * length).expand(-1, -1, length)
    fixed = torch.cat([is_first, (near_M1J >= 0) & (near_M1J <= query_ML1)], -1)[None, None]
    free = is_chosen_BGNS.repeat_interleave(length, -1)
    if mask_BN is not None:
        fixed_keys = torch.cat([in_block_L.expand(num_blocks, 1, -1), near_M1J.clamp_min(0)], -1)
        free_keys = (chosen_BGNS[..., None] * length + in_block_L).flatten(-2)
        fixed = fixed & mask_BN[:, fixed_keys][:, None]
        free = free & mask_BN.gather(1, free_keys.flatten(1)).view_as(free)
    free = free.unflatten(2, (num_blocks, length))
    return torch.cat([fixed.expand(*free.shape[:4], -1), free], -1)


def _multiply_each(x_BGRMLI: Tensor, of_each_BGNIO: Tensor) -> Float[Tensor, "B G R M L O"]:
    """Return the products with one matrix per position and group."""
    y_BGNRO = x_BGRMLI.flatten(3, 4).transpose(2, 3) @ of_each_BGNIO
    return y_BGNRO.transpose(2, 3).unflatten(3, x_BGRMLI.shape[3:5])


def _gather_blocks(x_BGMLK: Tensor, chosen_BGNS: Tensor) -> Float[Tensor, "B G N J K"]:
    """Gather the chosen blocks at each position, (B, G, N, S·L, K)."""
    batch, groups, num_blocks, length, width = x_BGMLK.shape
    first = torch.arange(batch * groups, device=x_BGMLK.device).view(batch, groups, 1, 1) * num_blocks
    rows = x_BGMLK.reshape(batch * groups * num_blocks, -1).index_select(0, (first + chosen_BGNS).flatten())
    num_positions, num_chosen = chosen_BGNS.shape[2:]
    return rows.view(batch, groups, num_positions, num_chosen * length, width)


def _prepend_previous_block(x_BGMLK: Tensor) -> Float[Tensor, "B G M J K"]:
    """Return each block after its predecessor, (B, G, M, 2L, K); zeros before the first."""
    return torch.cat([F.pad(x_BGMLK, (0, 0, 0, 0, 1, 0))[:, :, :-1], x_BGMLK], -2)


def masked_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over visible entries, in float32 or wider; zero in empty rows."""
    # the softmax of a row of −∞ is NaN: let the row see everything, then zero its output
    empty = ~visible.any(-1, keepdim=True)
    return at_least_float32(logits).masked_fill(~(visible | empty), -math.inf).softmax(-1).masked_fill(~visible, 0.0)


def attend_window(
    q_BGRNK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, window: int, mask_BN: Tensor | None, dropped: float
) -> Float[Tensor, "B G R N K"]:
    """Return attention of each query i to valid keys i − window ≤ j ≤ i.

    Computed in blocks of queries, each with its band of keys.

    Args:
        q_BGRNK: queries, R per group.
        k_BGNK: keys.
        v_BGNK: values.
        window: keys before each query.
        mask_BN: True at valid positions; None without padding.
        dropped: dropout rate on weights.
    """
    num_positions, group = k_BGNK.shape[2], q_BGRNK.shape[2]
    window = min(window, num_positions)  # beyond that a band has only zeros
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
    of_group = visible.repeat(*(1,) * (visible.ndim - 2), group, 1)  # the group's queries are stacked
    y_BGMQK = attend(q_BGMRCK.flatten(3, 4), k_BGMJK, v_BGMJK, of_group, dropped)
    return y_BGMQK.unflatten(3, (group, block)).transpose(2, 3).flatten(3, 4)[:, :, :, :num_positions]


def window_block(window: int, num_positions: int) -> int:
    """Return the number of queries per block in `attend_window`."""
    return min(max(window, MIN_BLOCK), num_positions)
