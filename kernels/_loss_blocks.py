"""Compute one block of a head's logits on chip: what all kernels of `kernels.loss` begin with."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Return ``total`` + ab for blocks a (M, K) and b (K, N), added up in the dtype of ``total``.

    ``WIDEN``: whether factors are made float32 first, which changes no product of bfloat16. Triton's interpreter needs
    it: its own product takes the bits of a bfloat16 for an integer.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def row_block(base, rows, row_ok, features, feature_ok, stride):
    """Load rows (M) by features (K) of a matrix whose rows lie ``stride`` apart; zeros beyond its edges."""
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
    """Return ``total`` + hWᵀ + b for a block of positions and a block of the vocabulary. Beyond the edges it holds
    what nobody may use."""
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
    """Return what can be subtracted from a row's logits: its maximum or log-sum-exp, but 0 where that is −∞ because no
    column has counted."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def nonzero(scale):
    """Return a sum of exponentials to divide by: 1 where it is 0, since no column has counted, and NaN where it is
    NaN."""
    return tl.where(scale == 0.0, 1.0, scale)
