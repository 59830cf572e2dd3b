"""Run the forward pass of softmax attention on a band.

One program per block of queries, one pass over its keys (online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867).
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
