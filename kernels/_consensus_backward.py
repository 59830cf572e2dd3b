"""Compute the gradients of g, with edge weights recomputed.

One kernel for the signals and the nodes' parts of the edge network, one for the network's second layers: it leaves the
product over all edges of the gradient by Λ and the hidden layer to torch.
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
    hidden_before,
    other_end,
    place_of_program,
    product,
    read,
    read_turn,
    read_turned_weight,
    read_vector,
    rotate,
    rotate_back,
    shift_down,
    write,
)


@triton.jit
def add_to(base, tile_XM, node_M, valid_M, feature_X, num_features, step, WIDE: tl.constexpr):
    """Add a tile to values stored earlier by the same program.

    Args:
        base: pointer to a head and sequence.
        tile_XM: (X, M).
        node_M: nodes.
        valid_M: whether to store a node.
        feature_X: features.
        num_features: X without padding.
        step: stride between features.
        WIDE: dtype of sums.
    """
    # another thread may have stored the values
    tl.debug_barrier()
    place_XM = feature_X[:, None].to(tl.int64) * step + node_M[None, :]
    given_XM = (feature_X < num_features)[:, None] & valid_M[None, :]
    before_XM = tl.load(base + place_XM, given_XM, other=0.0).to(WIDE)
    tl.store(base + place_XM, (before_XM + tile_XM).to(base.dtype.element_ty), given_XM)


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
    turned_weight, gradient, by_own, by_source, by_target, own_head, other_head, source_head, target_head, heads, batch,
    num_own, num_other, num_tiles, num_steps, window, rank, head_width, num_hidden, num_targets, FROM_OWN: tl.constexpr,
    FROM_OTHER: tl.constexpr, BOTH: tl.constexpr, COMPLETE: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write the gradients by the own nodes' signal and edge-network parts.

    Shapes (H, K, B, N) and (H, ξ, B, N), the latter zero before: as sources of edges and, for edges in both directions,
    as targets. Tiles as in `flow_kernel`.

    Args:
        own … turn: inputs as in `arguments`.
        turned_weight: W_Λ as (H, ξ, r·K).
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
    turned_weight += h * rank * head_width * num_hidden
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
                    lambda_weight, lambda_bias, row, rank, head_width, num_hidden, RANKED, M, K, X, ROWS, EVEN, WIDE,
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
                    of_alpha_X = read_vector(scalar_weight, hidden_X, num_hidden, WIDE)
                    by_hidden_XM = of_alpha_X[:, None] * by_alpha_M[None, :]
                    if RANKED:
                        of_beta_X = read_vector(scalar_weight + num_hidden, hidden_X, num_hidden, WIDE)
                        by_hidden_XM += of_beta_X[:, None] * by_beta_M[None, :]
                        weight_CX = read_turned_weight(
                            turned_weight, row, hidden_X, rank, head_width, num_hidden, ROWS, K, EVEN
                        )
                        by_hidden_MX = product(by_lambda_MC, weight_CX, MATRIX, WIDE, PRECISION)
                        by_hidden_XM += tl.trans(by_hidden_MX)  # pyright: ignore[reportArgumentType]
                    z_XM = hidden_before(
                        at_own, at_other, own_M, other_M, valid_M, first, num_hidden, own_step, other_step, X, EVEN,
                        WIDE,
                    )  # fmt: skip
                    by_z_XM = by_hidden_XM * (gaussian_cdf(z_XM) + z_XM * gaussian_density(z_XM))
                    add_to(by_at_own, by_z_XM, own_M, kept_M, hidden_X, num_hidden, own_step, WIDE)
                    if BOTH:  # edges of this tile's other ends that are its own nodes; the rest is the next tile's
                        is_here_M = (other_M >= tile * (M - halo)) & (other_M < num_own)
                        is_here_M = is_here_M & (other_M < (tile + 1) * (M - halo))
                        add_to(by_at_other, by_z_XM, other_M, is_here_M, hidden_X, num_hidden, own_step, WIDE)
        by_own_MK += drawn_MK
        if BOTH:
            by_own_MK -= shift_down(drawn_MK, step + 1, M, K)
    write(by_own + h * head_width * own_step + b * num_own, by_own_MK, own_M, kept_M, width_K, head_width, own_step)


@triton.jit(do_not_specialize=["first_head", "first_sequence", "first_step"])
def weights_kernel(
    own, other, source, target, scalar_weight, scalar_bias, lambda_weight, lambda_bias, own_mask, other_mask, turn,
    gradient, by_scalar_weight, by_scalar_bias, by_lambda, hidden, own_head, other_head, source_head, target_head,
    heads, batch, num_own, num_other, num_tiles, num_steps, first_head, first_sequence, first_step, some_heads,
    some_sequences, window, rank, head_width, num_hidden, num_targets, BOTH: tl.constexpr, COMPLETE: tl.constexpr,
    OWN_MASKED: tl.constexpr, OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, X: tl.constexpr, ALL_X: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    MATRIX: tl.constexpr, PRECISION: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write a chunk of edges' gradients by Λ and hidden layers, the factors of the gradients by W_Λ and its bias.

    A chunk has some heads, sequences and steps. Its edges E are (step, direction, sequence, node). A program has one
    tile, sequence and head, and sums the gradients by α's and β's weights over its edges.

    Args:
        own … turn: inputs as in `arguments`.
        gradient: dL/dg.
        by_scalar_weight: output (tiles, H, S, ξ), tiles over the chunk's sequences.
        by_scalar_bias: output (tiles, H, S).
        by_lambda: output (H, r·K, E), in the order of the chunk.
        hidden: output (H, ξ, E).
        own_head … num_targets: strides and sizes as in `arguments`.
        first_head, first_sequence, first_step, some_heads, some_sequences: the chunk; it has num_steps steps.
        BOTH … SMALLEST: constants as in `settings`; ALL_X is all of ξ, padded.
    """
    tile, at_b, at_h = place_of_program(num_tiles, some_sequences)
    b, h = at_b + first_sequence, at_h + first_head
    own_M = tile * M + tl.arange(0, M)
    here_M = own_M < num_own
    width_K, all_X, column_C = tl.arange(0, K), tl.arange(0, ALL_X), tl.arange(0, ROWS * K)
    own_step, other_step = tl.cast(batch, tl.int64) * num_own, tl.cast(batch, tl.int64) * num_other
    own, source = own + h * own_head + b * num_own, source + h * source_head + b * num_own
    other, target = other + h * other_head + b * num_other, target + h * target_head + b * num_other
    num_scalars = 2 if RANKED else 1
    scalar_weight, scalar_bias = scalar_weight + h * num_scalars * num_hidden, scalar_bias + h * num_scalars
    lambda_weight, lambda_bias = lambda_weight + h * rank * head_width * num_hidden, lambda_bias + h * rank * head_width
    rank_or_one = rank if RANKED else 1
    directions = 2 if BOTH else 1
    some_edges = tl.cast(num_steps, tl.int64) * directions * some_sequences * num_own
    by_alpha_X, by_beta_X = tl.zeros([ALL_X], WIDE), tl.zeros([ALL_X], WIDE)
    sum_alpha_M, sum_beta_M = tl.zeros([M], WIDE), tl.zeros([M], WIDE)
    for at_step in range(num_steps):
        other_M = other_end(own_M, first_step + at_step, window, M, BOTH, COMPLETE)
        valid_M = edge_is_valid(
            own_mask + b * num_own, other_mask + b * num_other, own_M, other_M, num_own, num_other, OWN_MASKED,
            OTHER_MASKED,
        )  # fmt: skip
        difference_MK, pull_MK = difference_and_pull(
            own, other, gradient, own_M, other_M, valid_M, width_K, head_width, own_step, other_step, num_own,
            num_other, h, b, tl.constexpr(True), BOTH, M, K, WIDE,
        )  # fmt: skip
        for direction in range(2 if BOTH else 1):
            if direction == 0:
                at_own, at_other = source, target
            else:
                at_own, at_other = target, source
            edge_M = ((at_step * directions + direction) * some_sequences + at_b) * num_own + own_M
            apart_MK = difference_MK
            if TURNED:
                cos_MK, sin_MK = read_turn(
                    turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, tl.constexpr(True),
                    WIDE,
                )  # fmt: skip
                apart_MK = rotate_back(difference_MK, cos_MK, sin_MK, width_K, head_width, M, K)
            by_alpha_M, by_beta_M = tl.zeros([M], WIDE), tl.zeros([M], WIDE)
            for row in range(0, rank_or_one, ROWS):
                alpha_M, beta_M, lambda_MRK = edge_network(
                    at_own, at_other, own_M, other_M, valid_M, own_step, other_step, scalar_weight, scalar_bias,
                    lambda_weight, lambda_bias, row, rank, head_width, num_hidden, RANKED, M, K, X, ROWS, EVEN, WIDE,
                    MATRIX, PRECISION,
                )  # fmt: skip
                _, of_alpha_M, of_beta_M, by_lambda_MC = gradients_of_edge(
                    alpha_M, beta_M, lambda_MRK, apart_MK, pull_MK, row, rank, RANKED, M, K, ROWS, SMALLEST,
                )  # fmt: skip
                by_alpha_M += of_alpha_M
                by_beta_M += of_beta_M
                if RANKED:
                    row_C, width_C = row + column_C // K, column_C % K
                    place_C = (at_h * rank + row_C) * head_width + width_C
                    given_MC = here_M[:, None] & ((row_C < rank) & (width_C < head_width))[None, :]
                    tl.store(by_lambda + place_C[None, :] * some_edges + edge_M[:, None], by_lambda_MC, given_MC)
            z_XM = hidden_before(
                at_own, at_other, own_M, other_M, valid_M, 0, num_hidden, own_step, other_step, ALL_X, EVEN, WIDE
            )
            z_XM = z_XM * gaussian_cdf(z_XM)
            by_alpha_X += tl.sum(z_XM * by_alpha_M[None, :], 1)
            sum_alpha_M += by_alpha_M
            if RANKED:
                by_beta_X += tl.sum(z_XM * by_beta_M[None, :], 1)
                sum_beta_M += by_beta_M
                place_X = at_h * num_hidden + all_X
                given_XM = (all_X < num_hidden)[:, None] & here_M[None, :]
                tl.store(hidden + place_X[:, None] * some_edges + edge_M[None, :], z_XM, given_XM)
    of_scalars = ((at_b * num_tiles + tile) * some_heads + at_h) * num_scalars
    tl.store(by_scalar_weight + of_scalars * num_hidden + all_X, by_alpha_X, mask=all_X < num_hidden)
    tl.store(by_scalar_bias + of_scalars, tl.sum(sum_alpha_M, 0))
    if RANKED:
        tl.store(by_scalar_weight + (of_scalars + 1) * num_hidden + all_X, by_beta_X, mask=all_X < num_hidden)
        tl.store(by_scalar_bias + of_scalars + 1, tl.sum(sum_beta_M, 0))
