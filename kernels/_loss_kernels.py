"""Compute log-sum-exp, target logit and plain sum over a vocabulary without its logits, and their gradients.

Each program passes block by block over some positions and a range of the vocabulary. `kernels.loss` combines the ranges
in a fixed order.

Gradients are computed strip by strip: for each strip of columns `logit_gradient_kernel` recomputes the logits and
stores their gradients; `hidden_gradient_kernel` adds the strip's part to the hidden states' gradient, and torch
computes its weights' and biases' gradients. The logits are thus computed twice in all, and only one strip is ever
stored. Each number is written by one program, with sums in a fixed order.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Return ``total`` + ab, with sums in the dtype of ``total``.

    Args:
        a: block (M, K).
        b: block (K, N).
        total: block (M, N).
        PRECISION: of float32 products.
        WIDEN: cast factors to float32 first; exact for bfloat16 products.
    """
    # Triton's interpreter reads a bfloat16's bits as an integer
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def row_block(base, rows, row_ok, features, feature_ok, stride):
    """Load rows (M) by features (K) of a matrix; zeros beyond its edges.

    Args:
        base: pointer to the matrix.
        rows: (M,).
        row_ok: whether they exist.
        features: (K,).
        feature_ok: whether they exist.
        stride: between two rows.
    """
    offsets = rows.to(tl.int64)[:, None] * stride + features[None, :]
    return tl.load(base + offsets, mask=row_ok[:, None] & feature_ok[None, :], other=0.0)


@triton.jit
def logits_block(
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
    total,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return ``total`` + hWᵀ + b for a block of positions and vocabulary.

    Values beyond the edges are undefined.

    Args:
        hidden: (R, D).
        weight: (V, D).
        bias: (V,), read if HAS_BIAS.
        rows: positions of the block.
        row_ok: whether they exist.
        columns: tokens of the block.
        column_ok: whether they exist.
        D: features.
        hidden_stride: between two positions.
        weight_stride: between two tokens.
        total: (rows, columns).
        HAS_BIAS: with biases.
        BLOCK_D: features at a time.
        PRECISION: as in `product`.
        WIDEN: as in `product`.
    """
    for start in range(0, D, BLOCK_D):
        features = start + tl.arange(0, BLOCK_D)
        feature_ok = features < D
        h = row_block(hidden, rows, row_ok, features, feature_ok, hidden_stride)
        w = row_block(weight, columns, column_ok, features, feature_ok, weight_stride)
        total = product(h, tl.trans(w), total, PRECISION, WIDEN)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=column_ok, other=0.0).to(total.dtype)[None, :]
    return total


@triton.jit
def finite_or_zero(maximum):
    """Return a row's shift for exponentials: its maximum or log-sum-exp, 0 for −∞.

    −∞ means no counted column.
    """
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def nonzero(scale):
    """Return a divisor: the sum of exponentials, 1 for 0 (no counted column); NaN stays."""
    return tl.where(scale == 0.0, 1.0, scale)


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
    """Write a vocabulary range's sums for a block of positions.

    Args:
        hidden, weight, bias, targets, left_out, out: tensors, commented above.
        R, V, D: positions, vocabulary, width.
        hidden_stride, weight_stride: elements from a row to the next.
        range_columns: columns of a range, a multiple of ``BLOCK_V``.
        HAS_BIAS, LEFT_OUT: whether ``bias`` and ``left_out`` are read.
        BLOCK_R, BLOCK_V, BLOCK_D: sizes of a block.
        PRECISION, WIDEN: as in `product`.
    """
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
    """Write the gradients of a strip's logits.

    Args:
        hidden, weight, bias, targets, left_out, log_sum, gradient, strip: tensors, commented above.
        R, D: positions, width.
        hidden_stride, weight_stride, strip_stride: elements from a row to the next.
        first, last: the strip's first column and the one after its last.
        HAS_BIAS, LEFT_OUT: whether ``bias`` and ``left_out`` are read.
        BLOCK_R, BLOCK_V, BLOCK_D: sizes of a block.
        PRECISION, WIDEN: as in `product`.
    """
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
    """Add a strip's part to the hidden states' gradient.

    Args:
        strip, weight, out: tensors, commented above.
        R, D: positions, width.
        weight_stride, strip_stride: elements from a row to the next.
        first, last: the strip's first column and the one after its last.
        IS_FIRST: whether ``out`` is overwritten.
        BLOCK_R, BLOCK_V, BLOCK_D: sizes of a block.
        PRECISION, WIDEN: as in `product`.
    """
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
