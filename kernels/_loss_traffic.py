"""Count what the kernels of `kernels.loss` load, store and multiply."""

from __future__ import annotations

from typing import Literal

import torch
import triton

from kernels._loss_plan import Blocks, blocks_of, product_blocks_of, ranges_of, second_blocks_of, strip_of, wide
from kernels.roofline import Traffic

INDEX = 8  # bytes of a target
Pass = Literal["forward", "backward", "second_order"]


def traffic(
    rows: int,
    columns: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    of: Pass = "forward",
    bias: bool = True,
    left_out: bool = False,
    precision: str = "ieee",
    blocks: Blocks | None = None,
) -> Traffic:
    """Return what the launches of one pass load and store, and the operations of their matrix products.

    Loads are what programs ask for; a GPU answers most of them from its cache, and `least_traffic` is what it has to
    read from its memory. ``of``: the pass; the backward pass is one to hidden states, weights and biases, the second
    order one in which hidden states have both derivatives, weights and biases the first. Sizes of blocks: as the
    launches choose them.
    """
    if of == "backward":
        multiplied = blocks or product_blocks_of(dtype, precision)
        return _backward(rows, columns, width, dtype, bias, left_out, blocks or blocks_of(dtype, precision), multiplied)
    is_second = of == "second_order"
    chosen = blocks or (second_blocks_of if is_second else blocks_of)(dtype, precision)
    row_blocks, column_blocks = triton.cdiv(rows, chosen.rows), triton.cdiv(columns, chosen.columns)
    ranges, _ = ranges_of(rows, columns, chosen)
    of_hidden, of_head, products = (3, 2, 5) if is_second else (1, 1, 1)
    planes = (10 if left_out else 7) if is_second else (3 if left_out else 2)
    factors = of_hidden * rows * column_blocks * width + of_head * row_blocks * columns * (width + bias)
    return Traffic(
        read=factors * dtype.itemsize + ranges * rows * INDEX * (1 + left_out),
        written=planes * ranges * rows * wide(dtype).itemsize,
        flops=2 * products * rows * columns * width,
    )


def _backward(
    rows: int,
    columns: int,
    width: int,
    dtype: torch.dtype,
    bias: bool,
    left_out: bool,
    blocks: Blocks,
    multiplied: Blocks,
) -> Traffic:
    size, broad = dtype.itemsize, wide(dtype).itemsize
    row_blocks, feature_blocks = triton.cdiv(rows, blocks.rows), triton.cdiv(width, multiplied.columns)
    strip_columns = strip_of(rows, columns, size, blocks)
    total = Traffic(0, 0, 0)
    for first in range(0, columns, strip_columns):
        strip = min(strip_columns, columns - first)
        of_each_row = (3 + left_out) * broad + (1 + left_out) * INDEX
        logits = Traffic(
            read=triton.cdiv(strip, blocks.columns) * rows * (width * size + of_each_row)
            + row_blocks * strip * (width + bias) * size,
            written=rows * strip * size,
            flops=2 * rows * strip * width,
        )
        hidden = Traffic(
            read=(feature_blocks * rows * strip + triton.cdiv(rows, multiplied.rows) * strip * width) * size
            + (0 if first == 0 else rows * width * broad),
            written=rows * width * broad,
            flops=2 * rows * strip * width,
        )
        weight = Traffic(
            read=(feature_blocks * rows * strip + triton.cdiv(strip, multiplied.rows) * rows * width) * size,
            written=strip * (width + bias) * size,
            flops=2 * rows * strip * width,
        )
        total += logits + hidden + weight
    return total


def least_traffic(
    rows: int,
    columns: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    of: Pass = "forward",
    left_out: bool = False,
) -> Traffic:
    """Return the same pass where nothing is read from memory or written to it twice: hidden states and the head, and
    backward their gradients and, once written and once read, those of the logits."""
    counted = traffic(rows, columns, width, dtype=dtype, of=of, left_out=left_out)
    matrices = (rows + columns) * width * dtype.itemsize
    if of == "backward":
        of_logits = rows * columns * dtype.itemsize
        return Traffic(matrices + of_logits, matrices + of_logits, counted.flops)
    along_a_line = (3 * rows + 2 * columns) * width * dtype.itemsize
    return Traffic(along_a_line if of == "second_order" else matrices, counted.written, counted.flops)
