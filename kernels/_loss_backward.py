"""Compute gradients of vocabulary sums by hidden states and head, strip by strip.

For each strip of columns `logit_gradient_kernel` recomputes the logits and stores their gradients;
`hidden_gradient_kernel` adds the strip's part to the hidden states' gradient, and torch computes its weights' and
biases' gradients. The logits are thus computed twice in all, and only one strip is ever stored. Each number is written
by one program, with sums in a fixed order.
"""

import triton
import triton.language as tl

from kernels._loss_blocks import finite_or_zero, logits_block, product, row_block


@triton.jit
def logit_gradient_kernel(
    hidden,  # (R, D)
    weight,  # (V, D)
    bias,  # (V)
    targets,  # (R), int64
    left_out,  # (R), int64, −1 for none
    log_sum,  # (R): the log-sum-exp
    gradient,  # (planes, R): of the log-sum-exp, the target's logit, and with LEFT_OUT the sum
    strip,  # (R, strip_stride): out, the gradients of the logits of the columns first … last − 1
    R,
    D,
    hidden_stride,
    weight_stride,
    strip_stride,
    first,
    last,
    HAS_BIAS: tl.constexpr,
    LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write the gradients of a strip's logits; parameters as commented."""
    wide: tl.constexpr = gradient.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < R
    columns = first + tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    column_ok = columns < last
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
    of_log_sum = tl.load(gradient + rows, mask=row_ok, other=0.0)
    of_target = tl.load(gradient + R + rows, mask=row_ok, other=0.0)
    target = tl.load(targets + rows, mask=row_ok, other=-1)
    shift = finite_or_zero(tl.load(log_sum + rows, mask=row_ok, other=0.0))
    found = of_log_sum[:, None] * tl.exp(z - shift[:, None])
    if LEFT_OUT:
        found += tl.load(gradient + 2 * R + rows, mask=row_ok, other=0.0)[:, None]
        own = tl.load(left_out + rows, mask=row_ok, other=-1)
        found = tl.where(columns[None, :] != own[:, None], found, 0.0)
    found += tl.where(columns[None, :] == target[:, None], of_target[:, None], 0.0)
    places = rows.to(tl.int64)[:, None] * strip_stride + (columns - first)[None, :]
    tl.store(strip + places, found.to(strip.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def hidden_gradient_kernel(
    strip,  # (R, strip_stride): gradients of the logits of the columns first … last − 1
    weight,  # (V, D)
    out,  # (R, D): added to; overwritten by the first strip
    R,
    D,
    weight_stride,
    strip_stride,
    first,
    last,
    IS_FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add a strip's part to the hidden states' gradient; parameters as commented."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    features = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_ok, feature_ok = rows < R, features < D
    places = rows.to(tl.int64)[:, None] * D + features[None, :]
    inside = row_ok[:, None] & feature_ok[None, :]
    if IS_FIRST:
        total = tl.zeros([BLOCK_R, BLOCK_D], out.dtype.element_ty)
    else:
        total = tl.load(out + places, mask=inside, other=0.0)
    for start in range(first, last, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        column_ok = columns < last
        of_logits = row_block(strip, rows, row_ok, columns - first, column_ok, strip_stride)
        w = row_block(weight, columns, column_ok, features, feature_ok, weight_stride)
        total = product(of_logits, w, total, PRECISION, WIDEN)
    tl.store(out + places, total, mask=inside)
