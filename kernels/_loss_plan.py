"""Choose how much of a loss over a vocabulary a program takes at a time, and how much of it exists at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

PROGRAMS = 512  # as many as fill an H100 a few times over; the ranges of a forward pass are made for them
STRIP_BYTES = 2**26  # of the gradients of logits that exist at once in a backward pass
STRIP_SHARE = 8  # … and at most this part of the vocabulary


class Blocks(NamedTuple):
    """Sizes of what a program holds at once, powers of two and at least 16: ``rows`` × ``columns`` of a matrix product
    and the ``inner`` length that is multiplied at a time; its warps, and the stages of its pipeline of loads."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 2


# What fits into the registers of an H100, as ptxas says (tests/kernels/test_loss.py). A kernel that takes exponentials
# of what it multiplied holds less at once than one that only multiplies, one of second order, with three sums, least.
HALF, ROUNDED = Blocks(128, 64, 64, 8, 3), Blocks(128, 64, 32, 8, 3)
SINGLE, DOUBLE = Blocks(64, 64, 32, 8, 3), Blocks(32, 32, 16, 4, 2)
HALF_PRODUCT, ROUNDED_PRODUCT = Blocks(128, 128, 64, 8, 3), Blocks(128, 128, 32, 8, 3)
HALF_SECOND, ROUNDED_SECOND = Blocks(64, 64, 32, 8, 3), Blocks(64, 64, 32, 8, 2)
SINGLE_SECOND = Blocks(32, 64, 16, 8, 2)


def blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes of a block of logits, for the kernels of first order."""
    if dtype == torch.bfloat16:
        return HALF
    if dtype == torch.float32:
        return ROUNDED if precision == "tf32" else SINGLE
    return DOUBLE


def product_blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes for the kernels that multiply a strip's gradients by hidden states or weights."""
    chosen = blocks_of(dtype, precision)
    return {HALF: HALF_PRODUCT, ROUNDED: ROUNDED_PRODUCT}.get(chosen, chosen)


def second_blocks_of(dtype: torch.dtype, precision: str) -> Blocks:
    """Return the sizes of a block of logits, for the kernel of second order."""
    chosen = blocks_of(dtype, precision)
    return {HALF: HALF_SECOND, ROUNDED: ROUNDED_SECOND, SINGLE: SINGLE_SECOND}.get(chosen, chosen)


def ranges_of(rows: int, columns: int, blocks: Blocks) -> tuple[int, int]:
    """Return into how many ranges of the vocabulary a forward pass is cut, none of them empty, and the columns of each:
    few positions alone would leave most of a GPU idle."""
    blocks_in_all = triton.cdiv(columns, blocks.columns)
    asked = max(1, min(blocks_in_all, PROGRAMS // triton.cdiv(rows, blocks.rows)))
    range_columns = triton.cdiv(blocks_in_all, asked) * blocks.columns
    return triton.cdiv(columns, range_columns), range_columns


def strip_of(rows: int, columns: int, itemsize: int, blocks: Blocks) -> int:
    """Return the columns of a strip: whole blocks, at least one, or the whole of a vocabulary that is shorter."""
    most = min(STRIP_BYTES // (rows * itemsize), columns // STRIP_SHARE)
    return min(max(most // blocks.columns, 1) * blocks.columns, columns)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32)
