"""Compute log-sum-exp, target logit and plain sum over a vocabulary without its logits.

Each program passes block by block over some positions and a range of the vocabulary. `kernels.loss` combines the ranges
in a fixed order.
"""

import triton
import triton.language as tl

from kernels._loss_blocks import finite_or_zero, logits_block, nonzero


@triton.jit
def sums_kernel(
    hidden,  # (R, D)
    weight,  # (V, D)
    bias,  # (V)
    targets,  # (R), int64
    left_out,  # (R), int64: the column excluded from log-sum-exp and sum, −1 for none
    out,  # (planes, ranges, R): log-sum-exp, the target's logit, and with LEFT_OUT the sum
    R,
    V,
    D,
    hidden_stride,
    weight_stride,
    range_columns,
    HAS_BIAS: tl.constexpr,
    LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write a vocabulary range's sums for a block of positions; parameters as commented."""
    wide: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < R
    target = tl.load(targets + rows, mask=row_ok, other=-1)
    own = tl.load(left_out + rows, mask=row_ok, other=-1) if LEFT_OUT else target
    maximum = tl.full([BLOCK_R], float("-inf"), wide)
    scale = tl.zeros([BLOCK_R], wide)
    at_target = tl.zeros([BLOCK_R], wide)
    total = tl.zeros([BLOCK_R], wide)
    first = tl.program_id(1) * range_columns
    for start in range(first, tl.minimum(first + range_columns, V), BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        column_ok = columns < V
        z = logits_block(
            hidden,
            weight,
            bias,
            rows,
            row_ok,
            columns,
            column_ok,
            D,
            hidden_stride,
            weight_stride,
            tl.zeros([BLOCK_R, BLOCK_V], wide),
            HAS_BIAS,
            BLOCK_D,
            PRECISION,
            WIDEN,
        )
        at_target += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
        counts = column_ok[None, :] & (rows >= 0)[:, None]
        if LEFT_OUT:
            counts = counts & (columns[None, :] != own[:, None])
            total += tl.sum(tl.where(counts, z, 0.0), 1)
        z = tl.where(counts, z, float("-inf"))
        highest = tl.maximum(maximum, tl.max(z, 1))
        base = finite_or_zero(highest)
        scale = scale * tl.exp(maximum - base) + tl.sum(tl.exp(z - base[:, None]), 1)
        maximum = highest
    place = tl.program_id(1).to(tl.int64) * R + rows
    plane = tl.num_programs(1).to(tl.int64) * R
    tl.store(out + place, maximum + tl.log(nonzero(scale)), mask=row_ok)
    tl.store(out + plane + place, at_target, mask=row_ok)
    if LEFT_OUT:
        tl.store(out + 2 * plane + place, total, mask=row_ok)
