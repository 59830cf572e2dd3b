"""Cut a sequence into query blocks with their keys, so that no tensor is N × N.

Keys are bands, or classes with equal remainder. Queries, keys and values are (…, N, K). Entries beyond the sequence's
ends are zero, and not `present`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Smallest block of queries. Compared with one product per offset: as fast at w = 2; at w = 12 a step takes 0.6 of the
# time.
MIN_BLOCK = 16


def even_block(num_positions: int, wanted: int) -> int:
    """Return the size of equal blocks, at most ``wanted``, with the fewest blocks."""
    num_blocks = -(-num_positions // wanted)
    return -(-num_positions // num_blocks)


def split_into_blocks(x: Tensor, block: int) -> Tensor:
    """Return (…, N, K) cut into blocks, (…, G, block, K)."""
    num_blocks = -(-x.shape[-2] // block)
    return F.pad(x, (0, 0, 0, num_blocks * block - x.shape[-2])).unflatten(-2, (num_blocks, block))


def bands(x: Tensor, block: int, before: int, after: int) -> Tensor:
    """Return each block with its neighbours, (…, N, K) → (…, G, before + block + after, K).

    Args:
        x: (…, N, K).
        block: positions per block.
        before: extra positions before each block.
        after: extra positions after each block.
    """
    fill = -x.shape[-2] % block
    return F.pad(x, (0, 0, before, fill + after)).unfold(-2, before + block + after, block).transpose(-1, -2)


def band_positions(
    num_positions: int, block: int, before: int, after: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the positions in `split_into_blocks` (queries) and in `bands` (keys).

    Args:
        num_positions: N.
        block: positions per block.
        before: extra key positions before each block.
        after: extra key positions after each block.
        device: device for the result.

    Returns:
        Query positions (G, block, 1) and key positions (G, 1, before + block + after).
    """
    starts = torch.arange(-(-num_positions // block), device=device)[:, None, None] * block
    query = starts + torch.arange(block, device=device)[:, None]
    return query, starts - before + torch.arange(before + block + after, device=device)


def split_into_classes(x: Tensor, stride: int) -> Tensor:
    """Group positions by remainder, (…, N, K) → (…, stride, L, K).

    Entry n in class r is position n·stride + r.
    """
    return split_into_blocks(x, stride).transpose(-2, -3)


def merge_classes(x: Tensor, num_positions: int) -> Tensor:
    """Reverse `split_into_classes`, (…, stride, L, K) → (…, N, K)."""
    return x.transpose(-2, -3).flatten(-3, -2)[..., :num_positions, :]


def present(position: Tensor, num_positions: int, mask_BN: Tensor | None) -> Tensor:
    """Return whether each ``position`` is inside the sequence and valid.

    Args:
        position: integers, any shape.
        num_positions: N.
        mask_BN: True at valid positions; None without padding.

    Returns:
        Booleans with the shape of ``position``, after a leading (B, 1) if there is a mask.
    """
    inside = (position >= 0) & (position < num_positions)
    return inside if mask_BN is None else inside & mask_BN[:, position.clamp(0, num_positions - 1)][:, None]
