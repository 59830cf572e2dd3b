"""Choose the block, range and strip sizes of a loss over a vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

PROGRAMS = 512  # enough to fill an H100 a few times; determines a forward pass's ranges
STRIP_BYTES = 2**26  # bytes of logit gradients stored at once in a backward pass
STRIP_SHARE = 8  # … and at most this part of the vocabulary


class Blocks(NamedTuple):
    """A program's block sizes, powers of two and at least 16.

    ``rows`` × ``columns`` of a matrix product, and its ``inner`` length per step; warps, and stages of the load
    pipeline.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 2


# Sizes within an H100's registers, according to ptxas (tests/kernels/test_loss.py). Largest for products alone, smaller
# with exponentials of products, smallest for second order, with three sums.
HALF, ROUNDED = Blocks(128, 64, 64, 8, 3), Blocks(128, 64, 32, 8, 3)
SINGLE, DOUBLE = Blocks(64, 64, 32, 8, 3), Blocks(32, 32, 16, 4, 2)
HALF_PRODUCT, ROUNDED_PRODUCT = Blocks(128, 128, 64, 8, 3), Blocks(128, 128, 32, 8, 3)
HALF_SECOND, ROUNDED_SECOND = Blocks(64, 64, 32, 8, 3), Blocks(64, 64, 32, 8, 2)
SINGLE_SECOND = Blocks(32, 64, 16, 8, 2)


def blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes for a block of logits, in first-order kernels."""
    if dtype == torch.bfloat16:
        return HALF
    if dtype == torch.float32:
        return ROUNDED if precision == "tf32" else SINGLE
    return DOUBLE


def product_blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes for products of a strip's gradients with hidden states or weights."""
    chosen = blocks_of(dtype, precision)
    return {HALF: HALF_PRODUCT, ROUNDED: ROUNDED_PRODUCT}.get(chosen, chosen)


def second_blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes for a block of logits, in the second-order kernel."""
    chosen = blocks_of(dtype, precision)
    return {HALF: HALF_SECOND, ROUNDED: ROUNDED_SECOND, SINGLE: SINGLE_SECOND}.get(chosen, chosen)


def ranges_of(rows: int, columns: int, blocks: Blocks) -> tuple[int, int]:
    """Return a forward pass's number of vocabulary ranges, and the columns of each.

    No range is empty.

    Args:
        rows: positions.
        columns: size of the vocabulary.
        blocks: sizes per program.
    """
    blocks_in_all = triton.cdiv(columns, blocks.columns)
    # with few positions a single range would leave most of a GPU idle
    asked = max(1, min(blocks_in_all, PROGRAMS // triton.cdiv(rows, blocks.rows)))
    range_columns = triton.cdiv(blocks_in_all, asked) * blocks.columns
    return triton.cdiv(columns, range_columns), range_columns


def strip_of(rows: int, columns: int, itemsize: int, blocks: Blocks) -> int:
    """Return a strip's columns: whole blocks, at least one, at most the vocabulary.

    Args:
        rows: positions.
        columns: size of the vocabulary.
        itemsize: bytes of a gradient.
        blocks: sizes per program.
    """
    most = min(STRIP_BYTES // (rows * itemsize), columns // STRIP_SHARE)
    return min(max(most // blocks.columns, 1) * blocks.columns, columns)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of this dtype."""
    return torch.promote_types(dtype, torch.float32)
