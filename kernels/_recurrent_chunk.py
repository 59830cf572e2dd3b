"""Compute a chunk's decays, pair products and triangular system, for all recurrence kernels.

C: positions per chunk; K: key features; W: decays per position, K or 1. Every decay is e to a sum of log-decays ≤ 0,
never a difference of two such sums: no overflow and no lost digits, even for strong decay.
"""

# triton declares the types of its language, not those of a kernel's arguments
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return the matrix product a @ b in the dtype of ``a``.

    Args:
        a: (I, J).
        b: (J, L).
        PRECISION: "ieee", or "tf32" with rounded factors.
    """
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit
def load_rows(pointer, strides, batch, head, row_C, num_rows, feature_F, num_features, DTYPE: tl.constexpr):
    """Return one head's rows as (C, F), with zeros beyond the edges.

    Args:
        pointer: to the tensor, with contiguous features.
        strides: by batch, head and position.
        batch: the sequence.
        head: the head.
        row_C: positions.
        num_rows: N.
        feature_F: features.
        num_features: F without padding.
        DTYPE: of the result.
    """
    offset = batch * strides[0] + head * strides[1] + row_C.to(tl.int64)[:, None] * strides[2] + feature_F[None, :]
    within = (row_C < num_rows)[:, None] & (feature_F < num_features)[None, :]
    return tl.load(pointer + offset, mask=within, other=0.0).to(DTYPE)


@triton.jit
def store_rows(pointer, value_CF, first_row, row_C, num_rows, feature_F, num_features):
    """Write (C, F) to a contiguous buffer (rows, features).

    Args:
        pointer: to the buffer.
        value_CF: (C, F).
        first_row: the head's first row in the buffer.
        row_C: rows within the head.
        num_rows: the head's number of rows.
        feature_F: features.
        num_features: F without padding.
    """
    offset = (first_row + row_C)[:, None] * num_features + feature_F[None, :]
    within = (row_C < num_rows)[:, None] & (feature_F < num_features)[None, :]
    tl.store(pointer + offset, value_CF.to(pointer.dtype.element_ty), mask=within)


@triton.jit
def is_later(CHUNK: tl.constexpr):
    """Return whether position i is after j, (C, C)."""
    place_C = tl.arange(0, CHUNK)
    return place_C[:, None] > place_C[None, :]


@triton.jit
def is_same(CHUNK: tl.constexpr):
    place_C = tl.arange(0, CHUNK)
    return place_C[:, None] == place_C[None, :]


@triton.jit
def sum_counted(counts_CC, value_CW, MANY: tl.constexpr):
    """Return Σ_l value_l over the counted positions l for each position i, (C, W).

    Args:
        counts_CC: whether l counts for i.
        value_CW: the values.
        MANY: whether W exceeds 1.
    """
    # not `tl.cumsum`: with fewer entries than threads, Triton 3.6 gives wrong sums on a GPU or does not compile
    if MANY:
        sum_CW = tl.dot(counts_CC.to(value_CW.dtype), value_CW, input_precision="ieee", out_dtype=value_CW.dtype)
    else:
        sum_CW = tl.sum(tl.where(tl.trans(counts_CC), value_CW, 0.0), 0)[:, None]
    return sum_CW


@triton.jit
def is_across(HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether j and i are in one block's first and second half.

    (C, C) of i and j; the block has 2·HALF positions. Over HALF = 1, 2, 4, … these are all pairs i > j, each once.
    """
    i_C1, j_1C = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    border_C1 = i_C1 // (2 * HALF) * (2 * HALF) + HALF
    return (i_C1 >= border_C1) & (j_1C < border_C1) & (j_1C >= border_C1 - HALF)


@triton.jit
def is_between(HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether the decay at l counts from position i to its border.

    (C, C) of i and l. The border is between the halves of i's block: from the border to i in the second half, from
    after i to the border in the first.
    """
    i_C1, l_1C = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    border_C1 = i_C1 // (2 * HALF) * (2 * HALF) + HALF
    in_second = (i_C1 >= border_C1) & (l_1C >= border_C1) & (l_1C <= i_C1)
    in_first = (i_C1 < border_C1) & (l_1C < border_C1) & (l_1C > i_C1)
    return in_second | in_first


@triton.jit
def decay_to_border(log_decay_CK, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Return each position's decay to its block's border, (C, K).

    Args:
        log_decay_CK: ln a.
        HALF: half a block.
        CHUNK: C.
    """
    between_CC = is_between(HALF, CHUNK).to(log_decay_CK.dtype)
    return tl.exp(tl.dot(between_CC, log_decay_CK, input_precision="ieee", out_dtype=log_decay_CK.dtype))


@triton.jit
def decay_of_pairs(log_decay_C1, CHUNK: tl.constexpr):
    """Return the decays between positions, (C, C): e^(Σ_{j < l ≤ i} ln a_l) for j ≤ i, else 0."""
    later_CC = is_later(CHUNK)
    up_to_CC = later_CC | is_same(CHUNK)
    sum_CC = sum_counted(up_to_CC, tl.where(later_CC, log_decay_C1, 0.0), True)
    return tl.where(up_to_CC, tl.exp(sum_CC), 0.0)


@triton.jit
def pair_products(
    q_CK, k_CK, log_decay_CW, FEATURES_DECAY: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return decayed query-key and key-key products, (C, C) each.

    Σ_K q_i k_j e^(Σ_{j < l ≤ i} ln a_l) for j ≤ i, and Σ_K k_i k_j e^(…) for j < i; 0 for other pairs. Without
    ``DELTA`` the second is zero.

    Args:
        q_CK: queries.
        k_CK: keys.
        log_decay_CW: ln a.
        FEATURES_DECAY: whether each feature has its own decay.
        DELTA: whether to return the second.
        CHUNK: C.
        LEVELS: log₂ C.
        PRECISION: as in `product`.
    """
    overlaps_CC = tl.zeros((CHUNK, CHUNK), q_CK.dtype)
    if FEATURES_DECAY:
        # the sum from j to i is split at the border between the halves of their smallest common block: both parts are
        # matrix products
        scores_CC = tl.where(is_same(CHUNK), tl.sum(q_CK * k_CK, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            across_CC = is_across(1 << level, CHUNK)
            decay_CK = decay_to_border(log_decay_CW, 1 << level, CHUNK)
            k_KC = tl.trans(k_CK * decay_CK)
            scores_CC += tl.where(across_CC, product(q_CK * decay_CK, k_KC, PRECISION), 0.0)
            if DELTA:
                overlaps_CC += tl.where(across_CC, product(k_CK * decay_CK, k_KC, PRECISION), 0.0)
    else:
        decay_CC = decay_of_pairs(log_decay_CW, CHUNK)
        scores_CC = product(q_CK, tl.trans(k_CK), PRECISION) * decay_CC
        if DELTA:
            overlaps_CC = product(k_CK, tl.trans(k_CK), PRECISION) * tl.where(is_later(CHUNK), decay_CC, 0.0)
    return scores_CC, overlaps_CC


@triton.jit
def pair_gradients(
    q_CK, k_CK, log_decay_CW, scores_CC, overlaps_CC, dscores_CC, doverlaps_CC, FEATURES_DECAY: tl.constexpr,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of `pair_products` by q, k and ln a.

    Args:
        q_CK, k_CK, log_decay_CW: the inputs.
        scores_CC, overlaps_CC: the results.
        dscores_CC, doverlaps_CC: their gradients; 0 for pairs with a zero result.
        FEATURES_DECAY … PRECISION: as in `pair_products`.
    """
    if FEATURES_DECAY:
        own_C1 = tl.sum(tl.where(is_same(CHUNK), dscores_CC, 0.0), 1)[:, None]
        dq_CK, dk_CK, dlog_CW = own_C1 * k_CK, own_C1 * q_CK, tl.zeros_like(k_CK)
        for level in tl.static_range(LEVELS):
            across_CC = is_across(1 << level, CHUNK)
            decay_CK = decay_to_border(log_decay_CW, 1 << level, CHUNK)
            q_decayed_CK, k_decayed_CK = q_CK * decay_CK, k_CK * decay_CK
            of_scores_CC = tl.where(across_CC, dscores_CC, 0.0)
            by_q_CK = product(of_scores_CC, k_decayed_CK, PRECISION)
            by_k_CK = product(tl.trans(of_scores_CC), q_decayed_CK, PRECISION)
            if DELTA:
                of_overlaps_CC = tl.where(across_CC, doverlaps_CC, 0.0)
                by_k_CK += product(of_overlaps_CC + tl.trans(of_overlaps_CC), k_decayed_CK, PRECISION)
            dq_CK += by_q_CK * decay_CK
            dk_CK += by_k_CK * decay_CK
            by_log_CK = by_q_CK * q_decayed_CK + by_k_CK * k_decayed_CK
            between_CC = is_between(1 << level, CHUNK).to(by_log_CK.dtype)
            dlog_CW += tl.dot(tl.trans(between_CC), by_log_CK, input_precision="ieee", out_dtype=by_log_CK.dtype)
    else:
        later_CC = is_later(CHUNK)
        decay_CC = decay_of_pairs(log_decay_CW, CHUNK)
        of_scores_CC = dscores_CC * decay_CC
        dq_CK = product(of_scores_CC, k_CK, PRECISION)
        dk_CK = product(tl.trans(of_scores_CC), q_CK, PRECISION)
        by_log_CC = dscores_CC * scores_CC
        if DELTA:
            of_overlaps_CC = tl.where(later_CC, doverlaps_CC * decay_CC, 0.0)
            dk_CK += product(of_overlaps_CC + tl.trans(of_overlaps_CC), k_CK, PRECISION)
            by_log_CC += doverlaps_CC * overlaps_CC
        # a pair (i, j) counts for the decays at j < l ≤ i
        from_there_CC = sum_counted(tl.trans(later_CC | is_same(CHUNK)), by_log_CC, True)
        dlog_CW = tl.sum(tl.where(later_CC, from_there_CC, 0.0), 1)[:, None]
    return dq_CK, dk_CK, dlog_CW


@triton.jit
def unit_lower_inverse(below_CC, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Return (I + below)⁻¹ for a strictly lower triangular matrix.

    Args:
        below_CC: the matrix.
        CHUNK: C.
        LEVELS: log₂ C.
    """
    inverse_CC = tl.where(is_same(CHUNK), 1.0, 0.0).to(below_CC.dtype)
    # forward substitution by blocks, from single rows up, and as stable: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹,
    # D⁻¹]]; powers of the matrix need as many products and lose all digits for similar keys
    inverse_CC -= tl.where(is_across(1, CHUNK), below_CC, 0.0)
    for level in tl.static_range(1, LEVELS):
        block_CC = tl.where(is_across(1 << level, CHUNK), below_CC, 0.0)
        joined_CC = tl.dot(inverse_CC, block_CC, input_precision="ieee", out_dtype=below_CC.dtype)
        inverse_CC -= tl.dot(joined_CC, inverse_CC, input_precision="ieee", out_dtype=below_CC.dtype)
    return inverse_CC
