"""Compute the gradients of g, with edge weights recomputed.

One kernel for the signals and the nodes' parts of the edge network, one for the network's second layers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._consensus_edges import (
    edge_is_valid,
    edge_network,
    gaussian_cdf,
    gaussian_density,
    gradients_of_edge,
    other_end,
    place_of_program,
    preactivation,
    product,
    read,
    read_lambda_weight,
    read_turn,
    read_vector,
    rotate,
    rotate_back,
    shift_down,
    write,
)


@triton.jit
def add_to(base, tile_MF, node_M, valid_M, feature_F, num_features, step, WIDE: tl.constexpr):
    """Add a tile to values stored earlier by the same program.

    Args:
        base: pointer to a head and sequence.
        tile_MF: (M, F).
        node_M: nodes.
        valid_M: whether to store a node.
        feature_F: features.
        num_features: F without padding.
        step: stride between features.
        WIDE: dtype of sums.
    """
    # another thread may have stored the values
    tl.debug_barrier()
    before_MF = read(base, node_M, valid_M, feature_F, num_features, step, WIDE)
    write(base, before_MF + tile_MF, node_M, valid_M, feature_F, num_features, step)


@triton.jit
def difference_and_pull(
    own, other, gradient, own_M, other_M, valid_M, width_K, head_width, own_step, other_step, num_own, num_other,
    h, b, FROM_OWN: tl.constexpr, FROM_OTHER: tl.constexpr, M: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return each edge's disagreement and the gradient by its flow, (M, K) each.

    The gradient by the flow is that of g at the receiving ends minus that at the giving ends.

    Args:
        own, other, gradient: pointers to u, v or u again, and dL/dg.
        own_M, other_M, valid_M: each edge's ends, and whether it exists.
        width_K, head_width: features.
        own_step, other_step: strides between features.
        num_own, num_other: nodes per sequence.
        h, b: head and sequence.
        FROM_OWN, FROM_OTHER: whether g belongs to the own, the other ends.
        M, K, WIDE: tile sizes, and the sums' dtype.
    """
    difference_MK = read(own, own_M, valid_M, width_K, head_width, own_step, WIDE)
    difference_MK -= read(other, other_M, valid_M, width_K, head_width, other_step, WIDE)
    pull_MK = tl.zeros([M, K], WIDE)
    if FROM_OWN:
        base = gradient + h * head_width * own_step + b * num_own
        pull_MK += read(base, own_M, valid_M, width_K, head_width, own_step, WIDE)
    if FROM_OTHER:
        base = gradient + h * head_width * other_step + b * num_other
        pull_MK -= read(base, other_M, valid_M, width_K, head_width, other_step, WIDE)
    return difference_MK, pull_MK


@triton.jit
def ends_kernel(
    own, other, source, target, scalar_weight, scalar_bias, lambda_weight, lambda_bias, own_mask, other_mask, turn,
    gradient, by_own, by_source, by_target, own_head, other_head, source_head, target_head, heads, batch, num_own,
    num_other, num_tiles, num_steps, window, rank, head_width, num_hidden, num_targets, FROM_OWN: tl.constexpr,
    FROM_OTHER: tl.constexpr, BOTH: tl.constexpr, COMPLETE: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, MATRIX: tl.constexpr, PRECISION: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write the gradients by the own nodes' signal and edge-network parts.

    Shapes (H, K, B, N) and (H, ξ, B, N), the latter zero before: as sources of edges and, for edges in both directions,
    as targets. Tiles as in `flow_kernel`.

    Args:
        own … turn: inputs as in `arguments`.
        gradient: dL/dg.
        by_own, by_source, by_target: outputs.
        own_head … num_targets: strides and sizes as in `arguments`.
        FROM_OWN, FROM_OTHER: whether g belongs to the own, the other ends.
        BOTH … SMALLEST: constants as in `settings`.
    """
    tile, b, h = place_of_program(num_tiles, batch)
    halo = window if BOTH else 0
    own_M = tile * (M - halo) - halo + tl.arange(0, M)
    kept_M = (own_M >= tile * (M - halo)) & (own_M < num_own)
    width_K = tl.arange(0, K)
    own_step, other_step = tl.cast(batch, tl.int64) * num_own, tl.cast(batch, tl.int64) * num_other
    own, source = own + h * own_head + b * num_own, source + h * source_head + b * num_own
    other, target = other + h * other_head + b * num_other, target + h * target_head + b * num_other
    by_source += h * num_hidden * own_step + b * num_own
    by_target += h * num_hidden * own_step + b * num_own
    num_scalars = 2 if RANKED else 1
    scalar_weight, scalar_bias = scalar_weight + h * num_scalars * num_hidden, scalar_bias + h * num_scalars
    lambda_weight, lambda_bias = lambda_weight + h * rank * head_width * num_hidden, lambda_bias + h * rank * head_width
    rank_or_one = rank if RANKED else 1
    by_own_MK = tl.zeros([M, K], WIDE)
    for step in range(num_steps):
        other_M = other_end(own_M, step, window, M, BOTH, COMPLETE)
        valid_M = edge_is_valid(
            own_mask + b * num_own, other_mask + b * num_other, own_M, other_M, num_own, num_other, OWN_MASKED,
            OTHER_MASKED,
        )  # fmt: skip
        difference_MK, pull_MK = difference_and_pull(
            own, other, gradient, own_M, other_M, valid_M, width_K, head_width, own_step, other_step, num_own,
            num_other, h, b, FROM_OWN, FROM_OTHER, M, K, WIDE,
        )  # fmt: skip
        drawn_MK = tl.zeros([M, K], WIDE)
        for direction in range(2 if BOTH else 1):
            if direction == 0:
                at_own, at_other, by_at_own, by_at_other = source, target, by_source, by_target
            else:
                at_own, at_other, by_at_own, by_at_other = target, source, by_target, by_source
            apart_MK = difference_MK
            if TURNED:
                cos_MK, sin_MK = read_turn(
                    turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, FROM_OWN,
                    WIDE,
                )  # fmt: skip
                apart_MK = rotate_back(difference_MK, cos_MK, sin_MK, width_K, head_width, M, K)
            for row in range(0, rank_or_one, ROWS):
                alpha_M, beta_M, lambda_MRK = edge_network(
                    at_own, at_other, own_M, other_M, valid_M, own_step, other_step, scalar_weight, scalar_bias,
                    lambda_weight, lambda_bias, row, rank, head_width, num_hidden, RANKED, M, K, X, ROWS, WIDE,
                    MATRIX, PRECISION,
                )  # fmt: skip
                of_rows_MK, by_alpha_M, by_beta_M, by_lambda_MC = gradients_of_edge(
                    alpha_M, beta_M, lambda_MRK, apart_MK, pull_MK, row, rank, RANKED, M, K, ROWS, SMALLEST,
                )  # fmt: skip
                if TURNED:
                    of_rows_MK = rotate(of_rows_MK, cos_MK, sin_MK, width_K, head_width, M, K)
                drawn_MK += of_rows_MK
                for first in range(0, num_hidden, X):
                    hidden_X = first + tl.arange(0, X)
                    by_hidden_MX = by_alpha_M[:, None] * read_vector(scalar_weight, hidden_X, num_hidden, WIDE)[None, :]
                    if RANKED:
                        of_beta_X = read_vector(scalar_weight + num_hidden, hidden_X, num_hidden, WIDE)
                        by_hidden_MX += by_beta_M[:, None] * of_beta_X[None, :]
                        weight_XC = read_lambda_weight(
                            lambda_weight, row, hidden_X, rank, head_width, num_hidden, ROWS, K
                        )
                        by_hidden_MX += product(by_lambda_MC, tl.trans(weight_XC), MATRIX, WIDE, PRECISION)
                    z_MX = preactivation(
                        at_own, at_other, own_M, other_M, valid_M, hidden_X, num_hidden, own_step, other_step, WIDE
                    )
                    by_z_MX = by_hidden_MX * (gaussian_cdf(z_MX) + z_MX * gaussian_density(z_MX))
                    add_to(by_at_own, by_z_MX, own_M, kept_M, hidden_X, num_hidden, own_step, WIDE)
                    if BOTH:
                        at_right_MX = shift_down(by_z_MX, step + 1, M, X)
                        add_to(by_at_other, at_right_MX, own_M, kept_M, hidden_X, num_hidden, own_step, WIDE)
        by_own_MK += drawn_MK
        if BOTH:
            by_own_MK -= shift_down(drawn_MK, step + 1, M, K)
    write(by_own + h * head_width * own_step + b * num_own, by_own_MK, own_M, kept_M, width_K, head_width, own_step)


@triton.jit
def weights_kernel(
    own, other, source, target, scalar_weight, scalar_bias, lambda_weight, lambda_bias, own_mask, other_mask, turn,
    gradient, by_scalar_weight, by_scalar_bias, by_lambda_weight, by_lambda_bias, own_head, other_head,
    source_head, target_head, heads, batch, num_own, num_other, num_tiles, num_steps, num_groups, num_parts,
    window, rank, head_width, num_hidden, num_targets, BOTH: tl.constexpr, COMPLETE: tl.constexpr,
    OWN_MASKED: tl.constexpr, OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, X: tl.constexpr, ALL_X: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    MATRIX: tl.constexpr, PRECISION: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write one program's part of the gradients by the edge network's second layers.

    For one head, ROWS rows of Λ and every ``num_parts``-th tile. Each edge belongs to one program per group of rows;
    α's gradient is in the first group, β's is the sum over all groups.

    Args:
        own … turn: inputs as in `arguments`.
        gradient: dL/dg.
        by_scalar_weight: output (P, G, H, S, ξ), P parts and G groups.
        by_scalar_bias: output (P, G, H, S).
        by_lambda_weight: output (P, H, r·K, ξ).
        by_lambda_bias: output (P, H, r·K).
        own_head … num_targets: strides and sizes as in `arguments`.
        num_groups, num_parts: G and P.
        BOTH … SMALLEST: constants as in `settings`; ALL_X is all of ξ, padded.
    """
    program = tl.program_id(0)
    part, group, h = program // (heads * num_groups), (program // heads) % num_groups, (program % heads).to(tl.int64)
    row, rows_before = group * ROWS, part.to(tl.int64) * heads + h
    width_K, all_X, column_C = tl.arange(0, K), tl.arange(0, ALL_X), tl.arange(0, ROWS * K)
    own_step, other_step = tl.cast(batch, tl.int64) * num_own, tl.cast(batch, tl.int64) * num_other
    num_scalars = 2 if RANKED else 1
    scalar_weight, scalar_bias = scalar_weight + h * num_scalars * num_hidden, scalar_bias + h * num_scalars
    lambda_weight, lambda_bias = lambda_weight + h * rank * head_width * num_hidden, lambda_bias + h * rank * head_width
    by_alpha_X, by_beta_X = tl.zeros([ALL_X], WIDE), tl.zeros([ALL_X], WIDE)
    sum_alpha_M, sum_beta_M = tl.zeros([M], WIDE), tl.zeros([M], WIDE)
    by_weight_CX, by_bias_C = tl.zeros([ROWS * K, ALL_X], WIDE), tl.zeros([ROWS * K], WIDE)
    for tile in range(part, num_tiles * batch, num_parts):
        b = (tile // num_tiles).to(tl.int64)
        own_M = (tile % num_tiles) * M + tl.arange(0, M)
        own_hb, other_hb = own + h * own_head + b * num_own, other + h * other_head + b * num_other
        source_hb = source + h * source_head + b * num_own
        target_hb = target + h * target_head + b * num_other
        for step in range(num_steps):
            other_M = other_end(own_M, step, window, M, BOTH, COMPLETE)
            valid_M = edge_is_valid(
                own_mask + b * num_own, other_mask + b * num_other, own_M, other_M, num_own, num_other, OWN_MASKED,
                OTHER_MASKED,
            )  # fmt: skip
            difference_MK, pull_MK = difference_and_pull(
                own_hb, other_hb, gradient, own_M, other_M, valid_M, width_K, head_width, own_step, other_step,
                num_own, num_other, h, b, tl.constexpr(True), BOTH, M, K, WIDE,
            )  # fmt: skip
            for direction in range(2 if BOTH else 1):
                if direction == 0:
                    at_own, at_other = source_hb, target_hb
                else:
                    at_own, at_other = target_hb, source_hb
                apart_MK = difference_MK
                if TURNED:
                    cos_MK, sin_MK = read_turn(
                        turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, tl.constexpr(True),
                        WIDE,
                    )  # fmt: skip
                    apart_MK = rotate_back(difference_MK, cos_MK, sin_MK, width_K, head_width, M, K)
                alpha_M, beta_M, lambda_MRK = edge_network(
                    at_own, at_other, own_M, other_M, valid_M, own_step, other_step, scalar_weight, scalar_bias,
                    lambda_weight, lambda_bias, row, rank, head_width, num_hidden, RANKED, M, K, X, ROWS, WIDE,
                    MATRIX, PRECISION,
                )  # fmt: skip
                _, by_alpha_M, by_beta_M, by_lambda_MC = gradients_of_edge(
                    alpha_M, beta_M, lambda_MRK, apart_MK, pull_MK, row, rank, RANKED, M, K, ROWS, SMALLEST,
                )  # fmt: skip
                z_MX = preactivation(
                    at_own, at_other, own_M, other_M, valid_M, all_X, num_hidden, own_step, other_step, WIDE
                )
                z_MX = z_MX * gaussian_cdf(z_MX)
                by_alpha_X += tl.sum(by_alpha_M[:, None] * z_MX, 0)
                by_beta_X += tl.sum(by_beta_M[:, None] * z_MX, 0)
                sum_alpha_M += by_alpha_M
                sum_beta_M += by_beta_M
                if RANKED:
                    by_weight_CX += product(tl.trans(by_lambda_MC), z_MX, MATRIX, WIDE, PRECISION)
                    by_bias_C += tl.sum(by_lambda_MC, 0)
    of_scalars = ((part.to(tl.int64) * num_groups + group) * heads + h) * num_scalars
    tl.store(by_scalar_weight + of_scalars * num_hidden + all_X, by_alpha_X, mask=all_X < num_hidden)
    tl.store(by_scalar_bias + of_scalars, tl.sum(sum_alpha_M, 0))
    if RANKED:
        tl.store(by_scalar_weight + (of_scalars + 1) * num_hidden + all_X, by_beta_X, mask=all_X < num_hidden)
        tl.store(by_scalar_bias + of_scalars + 1, tl.sum(sum_beta_M, 0))
        row_C, width_C = row + column_C // K, column_C % K
        given_C = (row_C < rank) & (width_C < head_width)
        place_C = rows_before * rank * head_width + row_C * head_width + width_C
        tl.store(by_lambda_bias + place_C, by_bias_C, mask=given_C)
        given_CX = given_C[:, None] & (all_X < num_hidden)[None, :]
        tl.store(by_lambda_weight + place_C[:, None] * num_hidden + all_X[None, :], by_weight_CX, mask=given_CX)
