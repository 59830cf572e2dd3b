# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
"""Run the backward pass of softmax attention on a band.

One kernel, by blocks of queries, computes dq and each block's share of the global keys' gradients; another, by blocks
of keys, computes dk and dv. No two programs write to the same address. Weights are recomputed from ln Σ exp s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._band_tiles import keys_of, num_tiles, places, product, program_of, sees, store_tile, tile_of, valid


@triton.jit
def query_kernel(
    q, k, v, present, out, lse, d_out, d_q, delta, k_shares, v_shares,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, g_b, g_h, g_n, d_b, d_h, d_n,
    heads, num_queries, width,
    SCALE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write dq, δ, and this block's terms of the global keys' dk and dv.

    For a block of queries: dq = Σ_j ds_ij k_j with ds = p (dp − δ), dp = do·v and δ = do·o.

    Args:
        q, k, v, present, out, lse, d_out: inputs and forward results; d_out is do.
        d_q, delta: outputs dq and δ.
        k_shares, v_shares: outputs (B, H, d, blocks, G, width).
        q_b, q_h, q_n … d_n: strides by batch, head and position.
        heads, num_queries, width: sizes.
        SCALE … ACC: constants as in `kernels._band_tiles`.
    """
    first, residue, b, h, blocks = program_of(num_queries, heads, ROWS, DILATION)
    features = tl.arange(0, WIDTH)
    row, n, is_row = places(first, residue, first + ROWS, num_queries, ROWS, DILATION)
    k, v, present = k + b * k_b + h * k_h, v + b * v_b + h * v_h, present + b * (num_queries + GLOBAL)
    of_head = (b * heads + h) * num_queries
    q_tile = tile_of(q + b * q_b + h * q_h, n, is_row, features, width, q_n)
    g_tile = tile_of(d_out + b * g_b + h * g_h, n, is_row, features, width, g_n)
    o_tile = tile_of(out + b * o_b + h * o_h, n, is_row, features, width, o_n)
    log_sum = tl.load(lse + of_head + n, mask=is_row, other=float("inf"))
    along = tl.sum(g_tile.to(ACC) * o_tile.to(ACC), 1)
    tl.store(delta + of_head + n, along, mask=is_row)
    dq = tl.zeros((ROWS, WIDTH), ACC)
    for tile in range(num_tiles(ROWS, OTHERS, BEFORE, AFTER, GLOBAL)):
        position, inside, seen = keys_of(
            tile, row, is_row, first, residue, present, num_queries,
            BEFORE, AFTER, DILATION, GLOBAL, MASKED, OWN, ROWS, OTHERS,
        )  # fmt: skip
        k_tile = tile_of(k, position, inside, features, width, k_n)
        v_tile = tile_of(v, position, inside, features, width, v_n)
        s = product(q_tile, tl.trans(k_tile), PRECISION, ACC) * SCALE
        p = tl.where(seen, tl.exp(s - log_sum[:, None]), 0.0)
        ds = p * (product(g_tile, tl.trans(v_tile), PRECISION, ACC) - along[:, None]) * SCALE
        dq += product(ds, k_tile, PRECISION, ACC)
    store_tile(d_q + b * d_b + h * d_h, n, is_row, features, width, d_n, dq)
    shares = (((b * heads + h) * DILATION + residue) * blocks + first // ROWS) * GLOBAL * width
    for start in range(0, GLOBAL, OTHERS):
        position = start + tl.arange(0, OTHERS)
        inside = position < GLOBAL
        k_tile = tile_of(k, position, inside, features, width, k_n)
        v_tile = tile_of(v, position, inside, features, width, v_n)
        seen = valid(present, position, inside, MASKED)[:, None] & is_row[None, :]
        s = product(k_tile, tl.trans(q_tile), PRECISION, ACC) * SCALE
        p = tl.where(seen, tl.exp(s - log_sum[None, :]), 0.0)
        ds = p * (product(v_tile, tl.trans(g_tile), PRECISION, ACC) - along[None, :]) * SCALE
        dk, dv = product(ds, q_tile, PRECISION, ACC), product(p, g_tile, PRECISION, ACC)
        store_tile(k_shares + shares, position, inside, features, width, width, dk)
        store_tile(v_shares + shares, position, inside, features, width, width, dv)


@triton.jit
def key_kernel(
    q, k, v, present, lse, delta, d_out, d_k, d_v,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, d_b, d_h, d_n,
    heads, num_queries, width,
    SCALE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write dk and dv for a block of keys.

    dk = Σ_i ds_ij q_i and dv = Σ_i p_ij do_i over the queries with these keys in their windows. No global keys.

    Args:
        q, k, v, present, lse, delta, d_out: inputs, ln Σ exp s, δ and do.
        d_k, d_v: outputs, with equal strides.
        q_b, q_h, q_n … d_n: strides by batch, head and position.
        heads, num_queries, width: sizes.
        SCALE … ACC: constants as in `kernels._band_tiles`.
    """
    first, residue, b, h, _ = program_of(num_queries, heads, ROWS, DILATION)
    features = tl.arange(0, WIDTH)
    key, m, is_key = places(first, residue, first + ROWS, num_queries, ROWS, DILATION)
    q, g, present = q + b * q_b + h * q_h, d_out + b * g_b + h * g_h, present + b * (num_queries + GLOBAL)
    of_head = (b * heads + h) * num_queries
    k_tile = tile_of(k + b * k_b + h * k_h, m + GLOBAL, is_key, features, width, k_n)
    v_tile = tile_of(v + b * v_b + h * v_h, m + GLOBAL, is_key, features, width, v_n)
    there = valid(present, m + GLOBAL, is_key, MASKED)[:, None]
    dk = tl.zeros((ROWS, WIDTH), ACC)
    dv = tl.zeros((ROWS, WIDTH), ACC)
    for start in range(0, ROWS + BEFORE + AFTER, OTHERS):
        row, n, is_row = places(first - AFTER + start, residue, first + ROWS + BEFORE, num_queries, OTHERS, DILATION)
        q_tile = tile_of(q, n, is_row, features, width, q_n)
        g_tile = tile_of(g, n, is_row, features, width, g_n)
        log_sum = tl.load(lse + of_head + n, mask=is_row, other=float("inf"))
        along = tl.load(delta + of_head + n, mask=is_row, other=0.0)
        seen = there & is_row[None, :]
        if OWN:
            seen = seen | (is_key[:, None] & is_row[None, :] & (key[:, None] == row[None, :]))
        seen = seen & sees(row[None, :], key[:, None], BEFORE, AFTER)
        s = product(k_tile, tl.trans(q_tile), PRECISION, ACC) * SCALE
        p = tl.where(seen, tl.exp(s - log_sum[None, :]), 0.0)
        ds = p * (product(v_tile, tl.trans(g_tile), PRECISION, ACC) - along[None, :]) * SCALE
        dk += product(ds, q_tile, PRECISION, ACC)
        dv += product(p, g_tile, PRECISION, ACC)
    store_tile(d_k + b * d_b + h * d_h, m + GLOBAL, is_key, features, width, d_n, dk)
    store_tile(d_v + b * d_b + h * d_h, m + GLOBAL, is_key, features, width, d_n, dv)
