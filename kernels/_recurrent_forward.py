"""Pass over a sequence's chunks with the state on chip, plainly or with two derivatives along a line.

Write each position's output, or each chunk's first state.
"""

# triton declares the types of its language, not those of a kernel's arguments
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels._recurrent_chunk import (
    is_later,
    is_same,
    load_rows,
    pair_products,
    product,
    store_rows,
    sum_counted,
    unit_lower_inverse,
)


@triton.jit
def decays_of_chunk(log_CW, CHUNK: tl.constexpr, DECAY_BLOCK: tl.constexpr):
    """Return a chunk's three decay products.

    From its beginning through each position (C, W), from after each position to its end (C, W), and over the whole
    chunk (W, 1).

    Args:
        log_CW: ln a.
        CHUNK: C.
        DECAY_BLOCK: W.
    """
    later_CC = is_later(CHUNK)
    since_CW = sum_counted(later_CC | is_same(CHUNK), log_CW, DECAY_BLOCK > 1)
    after_CW = sum_counted(tl.trans(later_CC), log_CW, DECAY_BLOCK > 1)
    return tl.exp(since_CW), tl.exp(after_CW), tl.exp(tl.sum(log_CW, 0))[:, None]


@triton.jit
def walk(
    q, k, v, beta, log_decay, strides, out, states, num_heads, num, key_width, value_width,
    DELTA: tl.constexpr, LOG_DECAY: tl.constexpr, DECAY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write y_t = S_tᵀ q_t, or each chunk's first state if ``out`` is None.

    Each program has a head of a sequence and VALUE_BLOCK value features.

    Args:
        q, k, v, beta, log_decay: inputs; β with DELTA, ln a with LOG_DECAY.
        strides: of these five, as in `load_rows`.
        out: output (B, H, N, V), or None.
        states: output (B, H, M, K, V), M chunks.
        num_heads, num, key_width, value_width: sizes.
        DELTA, LOG_DECAY: with delta rule, with decay.
        DECAY_BLOCK: KEY_BLOCK if each feature has its own decay, else 1.
        KEY_BLOCK, VALUE_BLOCK: features, padded.
        CHUNK, LEVELS: C and log₂ C.
        PRECISION, DTYPE: of products, of sums.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // num_heads, sequence % num_heads
    key_K = tl.arange(0, KEY_BLOCK)
    value_V = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    one, decay_W = tl.arange(0, 1), tl.arange(0, DECAY_BLOCK)
    decay_width = key_width if DECAY_BLOCK > 1 else 1
    state_KV = tl.zeros((KEY_BLOCK, VALUE_BLOCK), DTYPE)
    for first in range(0, num, CHUNK):
        row_C = first + tl.arange(0, CHUNK)
        if out is None:
            state_row = (sequence * tl.cdiv(num, CHUNK) + first // CHUNK) * key_width
            store_rows(states, state_KV, state_row, key_K, key_width, value_V, value_width)
        k_CK = load_rows(k, strides[1], batch, head, row_C, num, key_K, key_width, DTYPE)
        q_CK = k_CK  # unused without an output
        if out is not None:
            q_CK = load_rows(q, strides[0], batch, head, row_C, num, key_K, key_width, DTYPE)
        written_CV = load_rows(v, strides[2], batch, head, row_C, num, value_V, value_width, DTYPE)
        log_CW = tl.zeros((CHUNK, DECAY_BLOCK), DTYPE)
        if LOG_DECAY:
            log_CW = load_rows(log_decay, strides[4], batch, head, row_C, num, decay_W, decay_width, DTYPE)
        since_CW, until_CW, whole_W1 = decays_of_chunk(log_CW, CHUNK, DECAY_BLOCK)
        scores_CC, overlaps_CC = pair_products(q_CK, k_CK, log_CW, DECAY_BLOCK > 1, DELTA, CHUNK, LEVELS, PRECISION)
        if DELTA:
            beta_C1 = load_rows(beta, strides[3], batch, head, row_C, num, one, 1, DTYPE)
            inverse_CC = unit_lower_inverse(beta_C1 * overlaps_CC, CHUNK, LEVELS)
            missing_CV = beta_C1 * (written_CV - product(k_CK * since_CW, state_KV, PRECISION))
            written_CV = product(inverse_CC, missing_CV, PRECISION)
        if out is not None:
            read_CV = product(q_CK * since_CW, state_KV, PRECISION) + product(scores_CC, written_CV, PRECISION)
            store_rows(out, read_CV, sequence * num, row_C, num, value_V, value_width)
        state_KV = whole_W1 * state_KV + product(tl.trans(k_CK * until_CW), written_CV, PRECISION)


@triton.jit
def load_parts(parts, strides, batch, head, row, num_rows, feature_F, num_features, DTYPE: tl.constexpr):
    """Return (f, f′, f″) at one position as (F, 1) each.

    Args:
        parts, strides: the three tensors and their strides.
        batch, head, row, num_rows, feature_F, num_features, DTYPE: as in `load_rows`.
    """
    f0 = load_rows(parts[0], strides[0], batch, head, row, num_rows, feature_F, num_features, DTYPE)
    f1 = load_rows(parts[1], strides[1], batch, head, row, num_rows, feature_F, num_features, DTYPE)
    f2 = load_rows(parts[2], strides[2], batch, head, row, num_rows, feature_F, num_features, DTYPE)
    return tl.trans(f0), tl.trans(f1), tl.trans(f2)


@triton.jit
def times(x0, x1, x2, y0, y1, y2):
    """Return x y, (x y)′ and (x y)″.

    Args:
        x0, x1, x2: x, x′, x″.
        y0, y1, y2: y, y′, y″.
    """
    return x0 * y0, x1 * y0 + x0 * y1, x2 * y0 + 2 * x1 * y1 + x0 * y2


@triton.jit
def read(x0, x1, x2, s0, s1, s2):
    """Return Sᵀ x and its two derivatives, (V, 1) each.

    Args:
        x0, x1, x2: x (K, 1) and two derivatives.
        s0, s1, s2: the state S (K, V).
    """
    y0, y1, y2 = times(x0, x1, x2, s0, s1, s2)
    return tl.sum(y0, 0)[:, None], tl.sum(y1, 0)[:, None], tl.sum(y2, 0)[:, None]


@triton.jit
def walk_along_line(
    q, k, v, beta, log_decay, strides, out, num_heads, num, key_width, value_width,
    DELTA: tl.constexpr, LOG_DECAY: tl.constexpr, DECAY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write y_t, y_t′ and y_t″; the state and its derivatives stay in registers.

    0, 1 and 2 in names are orders of the derivative. Programs as in `walk`.

    Args:
        q, k, v, beta, log_decay: tuples (f, f′, f″).
        strides: of each tensor in these tuples.
        out: output (3, B, H, N, V).
        num_heads, num, key_width, value_width: sizes.
        DELTA … DTYPE: constants as in `walk`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // num_heads, sequence % num_heads
    key_K = tl.arange(0, KEY_BLOCK)
    value_V = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    one, decay_W = tl.arange(0, 1), tl.arange(0, DECAY_BLOCK)
    decay_width = key_width if DECAY_BLOCK > 1 else 1
    s0 = tl.zeros((KEY_BLOCK, VALUE_BLOCK), DTYPE)
    s1, s2 = tl.zeros_like(s0), tl.zeros_like(s0)
    for position in range(num):
        row = position + one
        k0, k1, k2 = load_parts(k, strides[1], batch, head, row, num, key_K, key_width, DTYPE)
        w0, w1, w2 = load_parts(v, strides[2], batch, head, row, num, value_V, value_width, DTYPE)
        if LOG_DECAY:
            g0, g1, g2 = load_parts(log_decay, strides[4], batch, head, row, num, decay_W, decay_width, DTYPE)
            a0 = tl.exp(g0)
            s0, s1, s2 = times(a0, a0 * g1, a0 * (g2 + g1 * g1), s0, s1, s2)
        if DELTA:
            b0, b1, b2 = load_parts(beta, strides[3], batch, head, row, num, one, 1, DTYPE)
            found0, found1, found2 = read(k0, k1, k2, s0, s1, s2)
            w0, w1, w2 = times(b0, b1, b2, w0 - found0, w1 - found1, w2 - found2)
        added0, added1, added2 = times(k0, k1, k2, tl.trans(w0), tl.trans(w1), tl.trans(w2))
        s0, s1, s2 = s0 + added0, s1 + added1, s2 + added2
        q0, q1, q2 = load_parts(q, strides[0], batch, head, row, num, key_K, key_width, DTYPE)
        y0, y1, y2 = read(q0, q1, q2, s0, s1, s2)
        first_row = sequence * num
        to_next = tl.num_programs(0).to(tl.int64) * num  # rows of one order
        store_rows(out, tl.trans(y0), first_row, row, num, value_V, value_width)
        store_rows(out, tl.trans(y1), to_next + first_row, row, num, value_V, value_width)
        store_rows(out, tl.trans(y2), 2 * to_next + first_row, row, num, value_V, value_width)
