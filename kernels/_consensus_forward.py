"""Compute consensus' g, the sum of each node's edge flows."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._consensus_edges import (
    edge_is_valid,
    edge_network,
    other_end,
    place_of_program,
    read,
    read_turn,
    rotate_back,
    shift_down,
    softplus,
    write,
)


@triton.jit
def flow_kernel(
    own, other, source, target, scalar_weight, scalar_bias, lambda_weight, lambda_bias, own_mask, other_mask, turn,
    out, own_head, other_head, source_head, target_head, heads, batch, num_own, num_other, num_tiles, num_steps, window,
    rank, head_width, num_hidden, num_targets, BOTH: tl.constexpr, COMPLETE: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write g (H, K, B, N) for one tile of nodes.

    The tile is in one head and sequence. For edges in both directions, the flow of the pair {i, i + offset} is added at
    i and subtracted at i + offset. The tile then begins ``window`` nodes early, to include all pairs of its nodes.

    Args:
        own … turn: inputs as in `arguments`.
        out: output.
        own_head … num_targets: strides and sizes as in `arguments`.
        BOTH … SMALLEST: constants as in `settings`; TURNED rotates disagreements back by the target's position.
    """
    tile, b, h = place_of_program(num_tiles, batch)
    halo = window if BOTH else 0
    own_M = tile * (M - halo) - halo + tl.arange(0, M)
    width_K = tl.arange(0, K)
    own_step, other_step = tl.cast(batch, tl.int64) * num_own, tl.cast(batch, tl.int64) * num_other
    own, source = own + h * own_head + b * num_own, source + h * source_head + b * num_own
    other, target = other + h * other_head + b * num_other, target + h * target_head + b * num_other
    num_scalars = 2 if RANKED else 1
    scalar_weight, scalar_bias = scalar_weight + h * num_scalars * num_hidden, scalar_bias + h * num_scalars
    lambda_weight, lambda_bias = lambda_weight + h * rank * head_width * num_hidden, lambda_bias + h * rank * head_width
    rank_or_one = rank if RANKED else 1
    g_MK = tl.zeros([M, K], WIDE)
    for step in range(num_steps):
        other_M = other_end(own_M, step, window, M, BOTH, COMPLETE)
        valid_M = edge_is_valid(
            own_mask + b * num_own, other_mask + b * num_other, own_M, other_M, num_own, num_other, OWN_MASKED,
            OTHER_MASKED,
        )  # fmt: skip
        difference_MK = read(own, own_M, valid_M, width_K, head_width, own_step, WIDE) - read(
            other, other_M, valid_M, width_K, head_width, other_step, WIDE
        )
        flow_MK = tl.zeros([M, K], WIDE)
        for direction in range(2 if BOTH else 1):  # a loop compiles the network once
            if direction == 0:
                at_own, at_other = source, target
            else:
                at_own, at_other = target, source
            apart_MK = difference_MK
            if TURNED:
                cos_MK, sin_MK = read_turn(
                    turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, tl.constexpr(True),
                    WIDE,
                )  # fmt: skip
                apart_MK = rotate_back(difference_MK, cos_MK, sin_MK, width_K, head_width, M, K)
            for row in range(0, rank_or_one, ROWS):
                alpha_M, beta_M, lambda_MRK = edge_network(
                    at_own, at_other, own_M, other_M, valid_M, own_step, other_step, scalar_weight, scalar_bias,
                    lambda_weight, lambda_bias, row, rank, head_width, num_hidden, RANKED, M, K, X, ROWS, EVEN, WIDE,
                    MATRIX, PRECISION,
                )  # fmt: skip
                if row == 0:
                    flow_MK += softplus(alpha_M)[:, None] * apart_MK
                if RANKED:
                    square_MR = tl.sum(lambda_MRK * lambda_MRK, 2)
                    gain_MR = softplus(beta_M)[:, None] / (rank * tl.where(square_MR > SMALLEST, square_MR, 1.0))
                    along_MR = gain_MR * tl.sum(lambda_MRK * apart_MK[:, None, :], 2)
                    flow_MK += tl.sum(along_MR[:, :, None] * lambda_MRK, 1)
        g_MK += flow_MK
        if BOTH:
            g_MK -= shift_down(flow_MK, step + 1, M, K)
    kept_M = (own_M >= tile * (M - halo)) & (own_M < num_own)
    write(out + h * head_width * own_step + b * num_own, g_MK, own_M, kept_M, width_K, head_width, own_step)
