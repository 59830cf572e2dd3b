"""Compute one block of a head's logits on chip, for all kernels of `kernels.loss`."""

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
