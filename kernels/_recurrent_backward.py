"""Pass over chunks from last to first, with the state's gradient on chip."""

# triton declares the types of its language, not those of a kernel's arguments
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels._recurrent_chunk import (
    is_later,
    is_same,
    load_rows,
    pair_gradients,
    pair_products,
    product,
    store_rows,
    sum_counted,
    unit_lower_inverse,
)
from kernels._recurrent_forward import decays_of_chunk


@triton.jit
def walk_back(
    q, k, v, beta, log_decay, strides, states, dout, dout_strides, dq, dk, dv, dbeta, dlog_decay,
    num_heads, num, key_width, value_width,
    DELTA: tl.constexpr, LOG_DECAY: tl.constexpr, DECAY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the gradients by v, and partial gradients by the other inputs.

    Programs and arguments as in `_recurrent_forward.walk`; written values are recomputed.

    Args:
        q, k, v, beta, log_decay, strides: as in `walk`.
        states: each chunk's first state, from `walk`.
        dout, dout_strides: the output's gradient.
        dv: output (B, H, N, V).
        dq, dk, dbeta, dlog_decay: outputs (value blocks, B, H, N, ·), to be summed over the first axis.
        num_heads, num, key_width, value_width: sizes.
        DELTA … DTYPE: constants as in `walk`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // num_heads, sequence % num_heads
    own_row = (tl.program_id(1) * tl.num_programs(0) + sequence) * num  # in partial sums over value blocks
    key_K = tl.arange(0, KEY_BLOCK)
    value_V = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    one, decay_W = tl.arange(0, 1), tl.arange(0, DECAY_BLOCK)
    decay_width = key_width if DECAY_BLOCK > 1 else 1
    dstate_KV = tl.zeros((KEY_BLOCK, VALUE_BLOCK), DTYPE)
    num_chunks = tl.cdiv(num, CHUNK)
    for done in range(num_chunks):
        first = (num_chunks - 1 - done) * CHUNK
        row_C = first + tl.arange(0, CHUNK)
        q_CK = load_rows(q, strides[0], batch, head, row_C, num, key_K, key_width, DTYPE)
        k_CK = load_rows(k, strides[1], batch, head, row_C, num, key_K, key_width, DTYPE)
        written_CV = load_rows(v, strides[2], batch, head, row_C, num, value_V, value_width, DTYPE)
        dread_CV = load_rows(dout, dout_strides, batch, head, row_C, num, value_V, value_width, DTYPE)
        log_CW = tl.zeros((CHUNK, DECAY_BLOCK), DTYPE)
        if LOG_DECAY:
            log_CW = load_rows(log_decay, strides[4], batch, head, row_C, num, decay_W, decay_width, DTYPE)
        since_CW, until_CW, whole_W1 = decays_of_chunk(log_CW, CHUNK, DECAY_BLOCK)
        state_row = (sequence * num_chunks + num_chunks - 1 - done) * key_width
        state_KV = load_rows(
            states + state_row * value_width, (0, 0, value_width), 0, 0, key_K, key_width, value_V, value_width, DTYPE
        )
        # reads and writes, as in `walk`
        scores_CC, overlaps_CC = pair_products(q_CK, k_CK, log_CW, DECAY_BLOCK > 1, DELTA, CHUNK, LEVELS, PRECISION)
        if DELTA:
            beta_C1 = load_rows(beta, strides[3], batch, head, row_C, num, one, 1, DTYPE)
            inverse_CC = unit_lower_inverse(beta_C1 * overlaps_CC, CHUNK, LEVELS)
            missing_CV = written_CV - product(k_CK * since_CW, state_KV, PRECISION)
            written_CV = product(inverse_CC, beta_C1 * missing_CV, PRECISION)
        # backward through reads and the chunk's last state to the written values
        dscores_CC = product(dread_CV, tl.trans(written_CV), PRECISION)
        dwritten_CV = product(tl.trans(scores_CC), dread_CV, PRECISION)
        dwritten_CV += product(k_CK * until_CW, dstate_KV, PRECISION)
        dfrom_start_CK = product(dread_CV, tl.trans(state_KV), PRECISION) * since_CW
        dto_end_CK = product(written_CV, tl.trans(dstate_KV), PRECISION) * until_CW
        dwhole_K1 = tl.sum(state_KV * dstate_KV, 1)[:, None] * whole_W1
        dstate_KV = whole_W1 * dstate_KV + product(tl.trans(q_CK * since_CW), dread_CV, PRECISION)
        by_since_CK = dfrom_start_CK * q_CK
        doverlaps_CC = tl.zeros_like(overlaps_CC)
        dk_CK = dto_end_CK
        if DELTA:
            # written = (I + strictly lower β overlaps)⁻¹ β missing
            dsolved_CV = product(tl.trans(inverse_CC), dwritten_CV, PRECISION)
            dsystem_CC = tl.where(is_later(CHUNK), -product(dsolved_CV, tl.trans(written_CV), PRECISION), 0.0)
            dbeta_C1 = (tl.sum(dsolved_CV * missing_CV, 1) + tl.sum(dsystem_CC * overlaps_CC, 1))[:, None]
            store_rows(dbeta, dbeta_C1, own_row, row_C, num, one, 1)
            doverlaps_CC = beta_C1 * dsystem_CC
            dwritten_CV = beta_C1 * dsolved_CV
            dfound_CK = -product(dwritten_CV, tl.trans(state_KV), PRECISION) * since_CW
            by_since_CK += dfound_CK * k_CK
            dk_CK += dfound_CK
            dstate_KV -= product(tl.trans(k_CK * since_CW), dwritten_CV, PRECISION)
        store_rows(dv, dwritten_CV, sequence * num, row_C, num, value_V, value_width)
        by_q_CK, by_k_CK, dlog_CW = pair_gradients(
            q_CK, k_CK, log_CW, scores_CC, overlaps_CC, dscores_CC, doverlaps_CC,
            DECAY_BLOCK > 1, DELTA, CHUNK, LEVELS, PRECISION,
        )  # fmt: skip
        store_rows(dq, dfrom_start_CK + by_q_CK, own_row, row_C, num, key_K, key_width)
        store_rows(dk, dk_CK + by_k_CK, own_row, row_C, num, key_K, key_width)
        if LOG_DECAY:
            dlog_CW += gradient_by_decays(by_since_CK, dto_end_CK * k_CK, dwhole_K1, DECAY_BLOCK > 1, CHUNK)
            store_rows(dlog_decay, dlog_CW, own_row, row_C, num, decay_W, decay_width)


@triton.jit
def gradient_by_decays(by_since_CK, by_until_CK, dwhole_K1, FEATURES_DECAY: tl.constexpr, CHUNK: tl.constexpr):
    """Return the gradient by ln a from those by three decay logarithms, (C, W).

    Args:
        by_since_CK: from the chunk's beginning to each position.
        by_until_CK: from after each position to the chunk's end.
        dwhole_K1: over the whole chunk.
        FEATURES_DECAY: whether each feature has its own decay.
        CHUNK: C.
    """
    by_since_CW, by_until_CW, by_whole_1W = by_since_CK, by_until_CK, tl.trans(dwhole_K1)
    if not FEATURES_DECAY:
        by_since_CW, by_until_CW = tl.sum(by_since_CK, 1)[:, None], tl.sum(by_until_CK, 1)[:, None]
        by_whole_1W = tl.sum(dwhole_K1, 0)[None, :]
    # the decay at l is in the first for positions i ≥ l, in the second for positions j < l
    later_CC = is_later(CHUNK)
    from_there_CW = sum_counted(tl.trans(later_CC | is_same(CHUNK)), by_since_CW, FEATURES_DECAY)
    return from_there_CW + sum_counted(later_CC, by_until_CW, FEATURES_DECAY) + by_whole_1W
