"""Read tiles of nodes and evaluate the edge network, for all consensus kernels.

A tile has M nodes as rows and features as columns. In memory features lead and nodes are contiguous, (H, F, B, N) as in
`stability.mechanisms`: a tile's addresses differ by 1 between rows and by B·N between columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def gaussian_cdf(z):
    """Return Φ(z); GELU(z) = z·Φ(z)."""
    return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))


@triton.jit
def gaussian_density(z):
    """Return φ(z) = Φ′(z)."""
    return 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def softplus(z):
    """Return log(1 + eᶻ), accurate also for small eᶻ."""
    e = tl.exp(-tl.abs(z))
    above_one = 1.0 + e
    excess = above_one - 1.0
    # the quotient cancels the rounding error of 1 + e
    of_excess = tl.log(above_one) * e / tl.where(excess == 0.0, 1.0, excess)
    return tl.maximum(z, 0.0) + tl.where(excess == 0.0, e, of_excess)


@triton.jit
def sigmoid(z):
    """Return 1/(1 + e⁻ᶻ), the derivative of `softplus`, without overflow."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def read(base, node_M, valid_M, feature_F, num_features, step, WIDE: tl.constexpr):
    """Return a tile (M, F); zeros for invalid nodes.

    Args:
        base: pointer to a head and sequence.
        node_M: nodes.
        valid_M: whether a node is valid.
        feature_F: features.
        num_features: F without padding.
        step: stride between features.
        WIDE: dtype of the tile.
    """
    offset_MF = feature_F[None, :].to(tl.int64) * step + node_M[:, None]
    given_MF = valid_M[:, None] & (feature_F < num_features)[None, :]
    return tl.load(base + offset_MF, mask=given_MF, other=0.0).to(WIDE)


@triton.jit
def write(base, tile_MF, node_M, valid_M, feature_F, num_features, step):
    """Write a tile (M, F) in the layout of `read`.

    Args:
        base: pointer to a head and sequence.
        tile_MF: the tile.
        node_M: nodes.
        valid_M: whether to store a node.
        feature_F: features.
        num_features: F without padding.
        step: stride between features.
    """
    offset_MF = feature_F[None, :].to(tl.int64) * step + node_M[:, None]
    given_MF = valid_M[:, None] & (feature_F < num_features)[None, :]
    tl.store(base + offset_MF, tile_MF.to(base.dtype.element_ty), mask=given_MF)


@triton.jit
def read_vector(base, feature_F, num_features, WIDE: tl.constexpr):
    """Return a weight vector (F,), zeros beyond its end.

    Args:
        base: pointer to the vector.
        feature_F: features.
        num_features: F without padding.
        WIDE: dtype of the vector.
    """
    return tl.load(base + feature_F, mask=feature_F < num_features, other=0.0).to(WIDE)


@triton.jit
def read_lambda_weight(
    base, row, hidden_X, rank, head_width, num_hidden, ROWS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr
):
    """Return weights (X, ROWS·K) from hidden features to consecutive rows of Λ.

    Zeros beyond r and beyond d_H.

    Args:
        base: pointer to a head's weights (r·d_H, ξ).
        row: first row.
        hidden_X: hidden features.
        rank: r.
        head_width: d_H.
        num_hidden: ξ.
        ROWS: number of rows.
        K: d_H, padded.
        EVEN: no tile is padded.
    """
    column_C = tl.arange(0, ROWS * K)
    if EVEN:
        found_XC = tl.load(base + row * K * num_hidden + (column_C[None, :] * num_hidden + hidden_X[:, None]))
    else:
        row_C, width_C = row + column_C // K, column_C % K
        given_XC = (hidden_X < num_hidden)[:, None] & ((row_C < rank) & (width_C < head_width))[None, :]
        place_XC = (row_C * head_width + width_C)[None, :] * num_hidden + hidden_X[:, None]
        found_XC = tl.load(base + place_XC, given_XC, other=0.0)
    return found_XC


@triton.jit
def read_turned_weight(
    base, row, hidden_X, rank, head_width, num_hidden, ROWS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr
):
    """Return weights (ROWS·K, X) of consecutive rows of Λ, which lie together in memory.

    Zeros beyond r and beyond d_H.

    Args:
        base: pointer to a head's weights (ξ, r·d_H).
        row … EVEN: as in `read_lambda_weight`.
    """
    column_C = tl.arange(0, ROWS * K)
    if EVEN:
        found_CX = tl.load(base + row * K + (hidden_X[None, :] * (rank * K) + column_C[:, None]))
    else:
        row_C, width_C = row + column_C // K, column_C % K
        given_CX = ((row_C < rank) & (width_C < head_width))[:, None] & (hidden_X < num_hidden)[None, :]
        place_CX = (row_C * head_width + width_C)[:, None] + (hidden_X * (rank * head_width))[None, :]
        found_CX = tl.load(base + place_CX, given_CX, other=0.0)
    return found_CX


@triton.jit
def read_lambda_bias(base, row, rank, head_width, ROWS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):
    """Return biases (ROWS·K,) for consecutive rows of Λ, as `read_lambda_weight`'s columns.

    Args:
        base: pointer to a head's biases (r·d_H,).
        row: first row.
        rank: r.
        head_width: d_H.
        ROWS: number of rows.
        K: d_H, padded.
        WIDE: dtype of the biases.
    """
    column_C = tl.arange(0, ROWS * K)
    row_C, width_C = row + column_C // K, column_C % K
    given_C = (row_C < rank) & (width_C < head_width)
    return tl.load(base + row_C * head_width + width_C, mask=given_C, other=0.0).to(WIDE)


@triton.jit
def product(left, right, MATRIX: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return left @ right, with factors rounded to MATRIX and sums in WIDE.

    Args:
        left: (M, X).
        right: (X, F).
        MATRIX: dtype of the factors.
        WIDE: dtype of the sums.
        PRECISION: of float32 products.
    """
    left, right = left.to(MATRIX), right.to(MATRIX)
    if INTERPRETED:  # NumPy reads a bfloat16's bits as an integer
        left, right = left.to(WIDE), right.to(WIDE)
    if MATRIX == tl.float64:  # noqa: SIM300  # Triton 3.6 does not compile tl.dot in float64 at all sizes
        found = tl.sum(left[:, :, None] * right[None, :, :], 1)
    else:
        found = tl.dot(left, right, input_precision=PRECISION, out_dtype=WIDE)
    return found


@triton.jit
def computed_once(x, WIDE: tl.constexpr):
    """Return x; Triton would compute it again in each layout that needs it, as a product's factor in every warp.

    Args:
        x: a tile.
        WIDE: its dtype.
    """
    if not INTERPRETED:  # noqa: SIM102  # Triton compiles both sides of an "and"
        if WIDE == tl.float32:  # noqa: SIM300
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def shift_down(tile_MF, distance, M: tl.constexpr, F: tl.constexpr):
    """Return the tile moved down by ``distance`` rows; zeros in the first rows.

    Args:
        tile_MF: (M, F).
        distance: number of rows.
        M: rows.
        F: columns.
    """
    from_MF = (tl.arange(0, M) - distance)[:, None] + tl.zeros([M, F], tl.int32)
    return tl.where(from_MF >= 0, tl.gather(tile_MF, tl.maximum(from_MF, 0), axis=0), 0.0)


@triton.jit
def place_of_program(num_tiles, batch):
    """Return this program's tile, sequence and head; the latter two as int64 for addresses."""
    program = tl.program_id(0)
    sequence = (program // num_tiles).to(tl.int64)
    return program % num_tiles, sequence % batch, sequence // batch


@triton.jit
def other_end(node_M, step, window, M: tl.constexpr, BOTH: tl.constexpr, COMPLETE: tl.constexpr):
    """Return the other end of each row's edge number ``step``.

    Args:
        node_M: each row's node.
        step: the edge's number.
        window: w.
        M: rows.
        BOTH: edges in both directions; one node to the right for each offset 1 … w.
        COMPLETE: one node for each context position; else offsets −w … w.
    """
    if BOTH:
        return node_M + (step + 1)
    if COMPLETE:
        return tl.zeros([M], tl.int32) + step
    return node_M + (step - window)


@triton.jit
def read_turn(
    turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, FROM_OWN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return cosine and signed sine of each row's target rotation, (M, K) each.

    Args:
        turn: (2, K, J).
        own_M: own ends.
        other_M: other ends.
        valid_M: whether an edge exists.
        width_K: features.
        head_width: d_H.
        num_targets: J.
        direction: 0, targets are the other ends; 1, the own ends.
        FROM_OWN: whether g belongs to the own ends; if not, targets are the own ends, the context.
        WIDE: dtype of the tiles.
    """
    target_M = tl.where(direction == 0, other_M, own_M) if FROM_OWN else own_M
    cos_MK = read(turn, target_M, valid_M, width_K, head_width, num_targets, WIDE)
    sin_MK = read(turn + head_width * num_targets, target_M, valid_M, width_K, head_width, num_targets, WIDE)
    return cos_MK, sin_MK


@triton.jit
def swap_halves(tile_MK, width_K, head_width, M: tl.constexpr, K: tl.constexpr):
    """Return the tile with its feature halves exchanged: column k from k ± d_H/2.

    Args:
        tile_MK: (M, K).
        width_K: features.
        head_width: d_H.
        M: rows.
        K: columns.
    """
    half = head_width // 2
    swapped_K = tl.where(width_K < half, width_K + half, tl.where(width_K < head_width, width_K - half, width_K))
    return tl.gather(tile_MK, swapped_K[None, :] + tl.zeros([M, K], tl.int32), axis=1)


@triton.jit
def rotate(tile_MK, cos_MK, sin_MK, width_K, head_width, M: tl.constexpr, K: tl.constexpr):
    """Return each row rotated by ρ(j), j its target (Eq. 42).

    Args:
        tile_MK: (M, K).
        cos_MK: cosines.
        sin_MK: signed sines.
        width_K: features.
        head_width: d_H.
        M: rows.
        K: columns.
    """
    return tile_MK * cos_MK + swap_halves(tile_MK, width_K, head_width, M, K) * sin_MK


@triton.jit
def rotate_back(tile_MK, cos_MK, sin_MK, width_K, head_width, M: tl.constexpr, K: tl.constexpr):
    """Return each row rotated back by ρ(j)ᵀ, j its target.

    Args:
        tile_MK: (M, K).
        cos_MK: cosines.
        sin_MK: signed sines.
        width_K: features.
        head_width: d_H.
        M: rows.
        K: columns.
    """
    return tile_MK * cos_MK - swap_halves(tile_MK, width_K, head_width, M, K) * sin_MK


@triton.jit
def edge_is_valid(
    own_mask, other_mask, own_M, other_M, num_own, num_other, OWN_MASKED: tl.constexpr, OTHER_MASKED: tl.constexpr
):
    """Return whether both ends of each row's edge exist and are not padding.

    Args:
        own_mask: a sequence's mask.
        other_mask: the other sequence's mask.
        own_M: own ends.
        other_M: other ends.
        num_own: length of the sequence.
        num_other: length of the other sequence.
        OWN_MASKED: whether there is a mask.
        OTHER_MASKED: whether there is another mask.
    """
    valid_M = (own_M >= 0) & (own_M < num_own) & (other_M >= 0) & (other_M < num_other)
    if OWN_MASKED:
        valid_M = valid_M & (tl.load(own_mask + own_M, mask=valid_M, other=0) != 0)
    if OTHER_MASKED:
        valid_M = valid_M & (tl.load(other_mask + other_M, mask=valid_M, other=0) != 0)
    return valid_M


@triton.jit
def preactivation(
    at_own, at_other, own_M, other_M, valid_M, hidden_X, num_hidden, own_step, other_step, WIDE: tl.constexpr
):
    """Return the edge network's hidden layer before GELU, (M, X): both ends' parts summed.

    Args:
        at_own: pointer to the own nodes' parts.
        at_other: pointer to the other nodes' parts.
        own_M: own ends.
        other_M: other ends.
        valid_M: whether an edge exists.
        hidden_X: hidden features.
        num_hidden: ξ.
        own_step: stride between features.
        other_step: stride between features.
        WIDE: dtype of the tile.
    """
    of_own_MX = read(at_own, own_M, valid_M, hidden_X, num_hidden, own_step, WIDE)
    return of_own_MX + read(at_other, other_M, valid_M, hidden_X, num_hidden, other_step, WIDE)


@triton.jit
def hidden_before(
    at_own, at_other, own_M, other_M, valid_M, first, num_hidden, own_step, other_step, X: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return X features of the hidden layer before GELU as they lie in memory, (X, M).

    Args:
        at_own … num_hidden: as in `preactivation`.
        first: first feature.
        own_step, other_step: strides between features.
        X, EVEN, WIDE: constants as in `settings`.
    """
    hidden_X = tl.arange(0, X)
    at_own += first * own_step
    at_other += first * other_step
    given_XM = valid_M[None, :]
    if not EVEN:
        given_XM = (first + hidden_X < num_hidden)[:, None] & given_XM
    if X <= 64:  # registers for addresses are scarce
        own_step, other_step = own_step.to(tl.int32), other_step.to(tl.int32)
    of_own_XM = tl.load(at_own + (hidden_X[:, None] * own_step + own_M[None, :]), given_XM, other=0.0)
    of_other_XM = tl.load(at_other + (hidden_X[:, None] * other_step + other_M[None, :]), given_XM, other=0.0)
    return of_own_XM.to(WIDE) + of_other_XM.to(WIDE)


@triton.jit
def edge_network(
    at_own, at_other, own_M, other_M, valid_M, own_step, other_step, scalar_weight, scalar_bias, lambda_weight,
    lambda_bias, row, rank, head_width, num_hidden, RANKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return α and β before softplus, and unnormalised rows of Λ.

    (M,) each, and (M, ROWS, K). The hidden layer is computed X features at a time. Without Λ (r = 0) β and Λ are
    undefined.

    Args:
        at_own … other_step: as in `preactivation`.
        scalar_weight, scalar_bias, lambda_weight, lambda_bias: pointers to a head's second layers.
        row, rank, head_width, num_hidden: first row, r, d_H, ξ.
        RANKED … PRECISION: constants as in `settings`.
    """
    alpha_XM, beta_XM = tl.zeros([X, M], WIDE), tl.zeros([X, M], WIDE)  # summed over X once, after the loop
    lambda_MC = tl.zeros([M, ROWS * K], WIDE)
    for first in range(0, num_hidden, X):
        hidden_X = first + tl.arange(0, X)
        z_XM = hidden_before(
            at_own, at_other, own_M, other_M, valid_M, first, num_hidden, own_step, other_step, X, EVEN, WIDE
        )
        z_XM = computed_once(z_XM * gaussian_cdf(z_XM), WIDE)
        alpha_XM += z_XM * read_vector(scalar_weight, hidden_X, num_hidden, WIDE)[:, None]
        if RANKED:
            beta_XM += z_XM * read_vector(scalar_weight + num_hidden, hidden_X, num_hidden, WIDE)[:, None]
            weight_XC = read_lambda_weight(lambda_weight, row, hidden_X, rank, head_width, num_hidden, ROWS, K, EVEN)
            z_MX = tl.trans(z_XM)  # pyright: ignore[reportArgumentType]
            lambda_MC += product(z_MX, weight_XC, MATRIX, WIDE, PRECISION)
    alpha_M, beta_M = tl.sum(alpha_XM, 0) + tl.load(scalar_bias).to(WIDE), tl.sum(beta_XM, 0)
    if RANKED:
        beta_M += tl.load(scalar_bias + 1).to(WIDE)
        lambda_MC += read_lambda_bias(lambda_bias, row, rank, head_width, ROWS, K, WIDE)[None, :]
    return alpha_M, beta_M, tl.reshape(lambda_MC, [M, ROWS, K])


@triton.jit
def gradients_of_edge(
    alpha_M, beta_M, lambda_MRK, difference_MK, pull_MK, row, rank, RANKED: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Return R·pull (M, K) and the gradients by α, β and Λ.

    The gradients are those of ⟨R·difference, pull⟩. Only the given rows of Λ contribute; α's part belongs to row 0.

    Args:
        alpha_M, beta_M, lambda_MRK: results of `edge_network`.
        difference_MK: each edge's disagreement.
        pull_MK: the gradient by each edge's flow.
        row, rank: first row, r.
        RANKED … SMALLEST: constants as in `settings`.
    """
    drawn_MK = tl.zeros_like(difference_MK)
    by_alpha_M = tl.zeros_like(alpha_M)
    by_beta_M = tl.zeros_like(alpha_M)
    by_lambda_MRK = tl.zeros_like(lambda_MRK)
    if row == 0:
        drawn_MK += softplus(alpha_M)[:, None] * pull_MK
        by_alpha_M += tl.sum(difference_MK * pull_MK, 1) * sigmoid(alpha_M)
    if RANKED:
        square_MR = tl.sum(lambda_MRK * lambda_MRK, 2)
        is_zero_MR = square_MR <= SMALLEST
        share_MR = 1.0 / (rank * tl.where(is_zero_MR, 1.0, square_MR))
        gain_MR = softplus(beta_M)[:, None] * share_MR
        along_MR = tl.sum(lambda_MRK * difference_MK[:, None, :], 2)
        pulled_MR = tl.sum(lambda_MRK * pull_MK[:, None, :], 2)
        drawn_MK += tl.sum((gain_MR * pulled_MR)[:, :, None] * lambda_MRK, 1)
        by_beta_M += tl.sum(along_MR * pulled_MR * share_MR, 1) * sigmoid(beta_M)
        shrink_MR = tl.where(is_zero_MR, 0.0, 2.0 * rank * gain_MR * share_MR * along_MR * pulled_MR)
        by_lambda_MRK += (
            (gain_MR * pulled_MR)[:, :, None] * difference_MK[:, None, :]
            + (gain_MR * along_MR)[:, :, None] * pull_MK[:, None, :]
            - shrink_MR[:, :, None] * lambda_MRK
        )
    return drawn_MK, by_alpha_M, by_beta_M, tl.reshape(by_lambda_MRK, [M, ROWS * K])
