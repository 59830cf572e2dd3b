"""Run the forward pass of softmax attention on a band, plainly or to second order along a line.

One program per block of queries. Plainly, one pass over its keys (online softmax: Milakov & Gimelshein 2018,
arXiv:1805.02867). To second order, one kernel, without stored scores, returns o, o′ and o″ from q, k and v with two
derivatives each. With p = softmax(s): o′ = Σ p (c v + v′) and o″ = Σ p ((r − ⟨p,r⟩) v + 2 c v′ + v″), with c = s′ −
⟨p,s′⟩ and r = s″ + c². The first pass over a block's keys computes Σ exp s, ⟨p,s′⟩ and ⟨p,s″⟩, the second the sums. c
and s″ are centred before multiplication: a difference of two large sums would be rounding noise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._band_tiles import keys_of, num_tiles, places, product, program_of, store_tile, tile_of


@triton.jit
def forward_kernel(
    q, k, v, present, out, lse,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, num_queries, width,
    SCALE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write softmax(s) v and ln Σ exp s for a block of queries.

    A query without visible keys gets zero and +∞, so exp(s − ln Σ) is 0.

    Args:
        q, k, v, present: inputs.
        out, lse: outputs.
        q_b, q_h, q_n … o_n: strides by batch, head and position.
        heads, num_queries, width: sizes.
        SCALE … ACC: constants as in `kernels._band_tiles`.
    """
    first, residue, b, h, _ = program_of(num_queries, heads, ROWS, DILATION)
    features = tl.arange(0, WIDTH)
    row, n, is_row = places(first, residue, first + ROWS, num_queries, ROWS, DILATION)
    k, v, present = k + b * k_b + h * k_h, v + b * v_b + h * v_h, present + b * (num_queries + GLOBAL)
    q_tile = tile_of(q + b * q_b + h * q_h, n, is_row, features, width, q_n)
    best = tl.full((ROWS,), -float("inf"), ACC)
    total = tl.zeros((ROWS,), ACC)
    o = tl.zeros((ROWS, WIDTH), ACC)
    for tile in range(num_tiles(ROWS, OTHERS, BEFORE, AFTER, GLOBAL)):
        position, inside, seen = keys_of(
            tile, row, is_row, first, residue, present, num_queries,
            BEFORE, AFTER, DILATION, GLOBAL, MASKED, OWN, ROWS, OTHERS,
        )  # fmt: skip
        k_tile = tile_of(k, position, inside, features, width, k_n)
        v_tile = tile_of(v, position, inside, features, width, v_n)
        s = product(q_tile, tl.trans(k_tile), PRECISION, ACC) * SCALE
        higher = tl.maximum(best, tl.max(tl.where(seen, s, -float("inf")), 1))
        # a row without visible keys so far has maximum −∞, not usable as a shift
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        e = tl.where(seen, tl.exp(s - shift[:, None]), 0.0)
        kept = tl.exp(best - shift)
        total = total * kept + tl.sum(e, 1)
        o = o * kept[:, None] + product(e, v_tile, PRECISION, ACC)
        best = higher
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    store_tile(out + b * o_b + h * o_h, n, is_row, features, width, o_n, o / total[:, None])
    found = tl.where(is_empty, float("inf"), best + tl.log(total))
    tl.store(lse + (b * heads + h) * num_queries + n, found, mask=is_row)


@triton.jit
def _scores(
    q0, q1, q2, k, dk, ddk, position, inside, features, width, k_n,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return scaled scores s, s′ and s″ with a key tile.

    s = qkᵀ, s′ = q′kᵀ + qk′ᵀ, s″ = q″kᵀ + 2q′k′ᵀ + qk″ᵀ.
    """
    k0 = tl.trans(tile_of(k, position, inside, features, width, k_n))
    k1 = tl.trans(tile_of(dk, position, inside, features, width, k_n))
    k2 = tl.trans(tile_of(ddk, position, inside, features, width, k_n))
    s0 = product(q0, k0, PRECISION, ACC)
    s1 = product(q1, k0, PRECISION, ACC) + product(q0, k1, PRECISION, ACC)
    s2 = product(q2, k0, PRECISION, ACC) + product(2 * q1, k1, PRECISION, ACC) + product(q0, k2, PRECISION, ACC)
    return s0 * SCALE, s1 * SCALE, s2 * SCALE


@triton.jit
def _add_means(s0, s1, s2, seen, best, total, first, second):
    """Add a tile to each row's running maximum and sums.

    The sums are Σ e, Σ e s′ and Σ e s″, e = exp(s − maximum).
    """
    higher = tl.maximum(best, tl.max(tl.where(seen, s0, -float("inf")), 1))
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    e = tl.where(seen, tl.exp(s0 - shift[:, None]), 0.0)
    kept = tl.exp(best - shift)
    total = total * kept + tl.sum(e, 1)
    return higher, total, first * kept + tl.sum(e * s1, 1), second * kept + tl.sum(e * s2, 1)


@triton.jit
def _add_sums(
    s0, s1, s2, seen, best, total, first, second, v0, v1, v2, out0, out1, out2, mean,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add a tile to the four output sums.

    Σ p v, Σ p (c v + v′), Σ p (r v + 2 c v′ + v″) and Σ p r, with ⟨p,s″⟩ subtracted from r.
    """
    p = tl.where(seen, tl.exp(s0 - best[:, None]) / total[:, None], 0.0)
    c = s1 - first[:, None]
    r = s2 - second[:, None] + c * c
    out0 += product(p, v0, PRECISION, ACC)
    out1 += product(p * c, v0, PRECISION, ACC) + product(p, v1, PRECISION, ACC)
    out2 += product(p * r, v0, PRECISION, ACC) + product(2 * p * c, v1, PRECISION, ACC)
    out2 += product(p, v2, PRECISION, ACC)
    return out0, out1, out2, mean + tl.sum(p * r, 1)


@triton.jit
def taylor_kernel(
    q, dq, ddq, k, dk, ddk, v, dv, ddv, present, out, d_out, dd_out,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, num_queries, width,
    SCALE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write o, o′ and o″ for a block of queries; zeros without visible keys.

    Args:
        q, dq, ddq, k, dk, ddk, v, dv, ddv: values with two derivatives; equal strides for each three.
        present: mask bytes (B, N).
        out, d_out, dd_out: outputs, with equal strides.
        q_b, q_h, q_n … o_n: strides by batch, head and position.
        heads, num_queries, width: sizes.
        SCALE … ACC: constants as in `kernels._band_tiles`.
    """
    start, residue, b, h, _ = program_of(num_queries, heads, ROWS, DILATION)
    features = tl.arange(0, WIDTH)
    row, n, is_row = places(start, residue, start + ROWS, num_queries, ROWS, DILATION)
    at_q, at_k, at_v, at_o = b * q_b + h * q_h, b * k_b + h * k_h, b * v_b + h * v_h, b * o_b + h * o_h
    k, dk, ddk, v, dv, ddv = k + at_k, dk + at_k, ddk + at_k, v + at_v, dv + at_v, ddv + at_v
    present += b * (num_queries + GLOBAL)
    q0 = tile_of(q + at_q, n, is_row, features, width, q_n)
    q1 = tile_of(dq + at_q, n, is_row, features, width, q_n)
    q2 = tile_of(ddq + at_q, n, is_row, features, width, q_n)
    best = tl.full((ROWS,), -float("inf"), ACC)
    total = tl.zeros((ROWS,), ACC)
    first = tl.zeros((ROWS,), ACC)
    second = tl.zeros((ROWS,), ACC)
    for tile in range(num_tiles(ROWS, OTHERS, BEFORE, AFTER, GLOBAL)):
        position, inside, seen = keys_of(
            tile, row, is_row, start, residue, present, num_queries,
            BEFORE, AFTER, DILATION, GLOBAL, MASKED, OWN, ROWS, OTHERS,
        )  # fmt: skip
        s0, s1, s2 = _scores(
            q0, q1, q2, k, dk, ddk, position, inside, features, width, k_n, SCALE, PRECISION, ACC
        )  # fmt: skip
        best, total, first, second = _add_means(s0, s1, s2, seen, best, total, first, second)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    best = tl.where(is_empty, 0.0, best)
    first = first / total
    second = second / total
    out0 = tl.zeros((ROWS, WIDTH), ACC)
    out1 = tl.zeros((ROWS, WIDTH), ACC)
    out2 = tl.zeros((ROWS, WIDTH), ACC)
    mean = tl.zeros((ROWS,), ACC)
    for tile in range(num_tiles(ROWS, OTHERS, BEFORE, AFTER, GLOBAL)):
        position, inside, seen = keys_of(
            tile, row, is_row, start, residue, present, num_queries,
            BEFORE, AFTER, DILATION, GLOBAL, MASKED, OWN, ROWS, OTHERS,
        )  # fmt: skip
        s0, s1, s2 = _scores(
            q0, q1, q2, k, dk, ddk, position, inside, features, width, k_n, SCALE, PRECISION, ACC
        )  # fmt: skip
        v0 = tile_of(v, position, inside, features, width, v_n)
        v1 = tile_of(dv, position, inside, features, width, v_n)
        v2 = tile_of(ddv, position, inside, features, width, v_n)
        out0, out1, out2, mean = _add_sums(
            s0, s1, s2, seen, best, total, first, second, v0, v1, v2, out0, out1, out2, mean, PRECISION, ACC
        )
    out2 -= mean[:, None] * out0
    store_tile(out + at_o, n, is_row, features, width, o_n, out0)
    store_tile(d_out + at_o, n, is_row, features, width, o_n, out1)
    store_tile(dd_out + at_o, n, is_row, features, width, o_n, out2)
