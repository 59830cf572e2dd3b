"""Compute consensus' g, g′ and g″ along a line in one pass.

From (f, f′, f″) of signals, the nodes' parts of the edge network, and its second layers' weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._consensus_edges import (
    edge_is_valid,
    gaussian_cdf,
    gaussian_density,
    other_end,
    place_of_program,
    preactivation,
    product,
    read,
    read_lambda_bias,
    read_lambda_weight,
    read_turn,
    read_vector,
    rotate_back,
    shift_down,
    sigmoid,
    softplus,
    write,
)


@triton.jit
def times(a0, a1, a2, b0, b1, b2):
    """Return (ab, (ab)′, (ab)″).

    Args:
        a0, a1, a2: a, a′, a″.
        b0, b1, b2: b, b′, b″.
    """
    return a0 * b0, a1 * b0 + a0 * b1, a2 * b0 + 2.0 * a1 * b1 + a0 * b2


@triton.jit
def softplus_of(z0, z1, z2):
    """Return softplus(z) and its two derivatives along the line.

    Args:
        z0: z.
        z1: z′.
        z2: z″.
    """
    slope = sigmoid(z0)
    return softplus(z0), slope * z1, slope * (1.0 - slope) * z1 * z1 + slope * z2


@triton.jit
def gelu_of(z0, z1, z2):
    """Return z·Φ(z) and its two derivatives along the line.

    GELU′ = Φ + zφ, GELU″ = (2 − z²)φ.

    Args:
        z0: z.
        z1: z′.
        z2: z″.
    """
    below, density = gaussian_cdf(z0), gaussian_density(z0)
    slope = below + z0 * density
    return z0 * below, slope * z1, (2.0 - z0 * z0) * density * z1 * z1 + slope * z2


@triton.jit
def product_along(
    z0, z1, z2, weight, row, hidden_X, rank, head_width, num_hidden, part,
    ROWS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, SECOND: tl.constexpr, MATRIX: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return z @ W and its two derivatives.

    Args:
        z0, z1, z2: z (M, X) and two derivatives.
        weight, row, hidden_X, rank, head_width, num_hidden: as in `read_lambda_weight`.
        part: stride from W to W′ and to W″.
        ROWS, K, EVEN, MATRIX, WIDE, PRECISION: as in `settings`.
        SECOND: whether W″ is not zero.
    """
    w0 = read_lambda_weight(weight, row, hidden_X, rank, head_width, num_hidden, ROWS, K, EVEN)
    w1 = read_lambda_weight(weight + part, row, hidden_X, rank, head_width, num_hidden, ROWS, K, EVEN)
    first = product(z1, w0, MATRIX, WIDE, PRECISION) + product(z0, w1, MATRIX, WIDE, PRECISION)
    second = product(z2, w0, MATRIX, WIDE, PRECISION) + product(2.0 * z1, w1, MATRIX, WIDE, PRECISION)
    if SECOND:
        w2 = read_lambda_weight(weight + 2 * part, row, hidden_X, rank, head_width, num_hidden, ROWS, K, EVEN)
        second += product(z0, w2, MATRIX, WIDE, PRECISION)
    return product(z0, w0, MATRIX, WIDE, PRECISION), first, second


@triton.jit
def scalar_along(z0, z1, z2, weight, hidden_X, num_hidden, part, WIDE: tl.constexpr):
    """Return Σ_x z_x w_x and its two derivatives, (M,) each.

    Args:
        z0, z1, z2: z (M, X) and two derivatives.
        weight, hidden_X, num_hidden, WIDE: as in `read_vector`.
        part: as in `product_along`.
    """
    s0, s1, s2 = times(
        z0,
        z1,
        z2,
        read_vector(weight, hidden_X, num_hidden, WIDE)[None, :],
        read_vector(weight + part, hidden_X, num_hidden, WIDE)[None, :],
        read_vector(weight + 2 * part, hidden_X, num_hidden, WIDE)[None, :],
    )
    return tl.sum(s0, 1), tl.sum(s1, 1), tl.sum(s2, 1)


@triton.jit
def anisotropic_of(
    b0, b1, b2, l0, l1, l2, d0, d1, d2, rank, SMALLEST: tl.constexpr
):  # fmt: skip
    """Return Σ_p β/(r‖Λ_p‖²) ⟨Λ_p, d⟩ Λ_p and its two derivatives, (M, K) each.

    Args:
        b0, b1, b2: β before softplus (M,), and two derivatives.
        l0, l1, l2: Λ (M, R, K).
        d0, d1, d2: the disagreement (M, K).
        rank: r.
        SMALLEST: squared norms up to this count as zero.
    """
    s0, s1, s2 = times(l0, l1, l2, l0, l1, l2)
    s0, s1, s2 = tl.sum(s0, 2), tl.sum(s1, 2), tl.sum(s2, 2)
    is_zero = s0 <= SMALLEST
    inverse = 1.0 / tl.where(is_zero, 1.0, s0)
    moving = tl.where(is_zero, 0.0, inverse)  # a zero row is divided by the constant 1
    q0, q1 = inverse, -s1 * moving * moving  # pyright: ignore[reportOperatorIssue]
    q2 = (2.0 * s1 * s1 * moving - s2) * moving * moving  # pyright: ignore[reportOperatorIssue]
    a0, a1, a2 = times(l0, l1, l2, d0[:, None, :], d1[:, None, :], d2[:, None, :])
    a0, a1, a2 = times(q0, q1, q2, tl.sum(a0, 2), tl.sum(a1, 2), tl.sum(a2, 2))
    b0, b1, b2 = softplus_of(b0, b1, b2)
    a0, a1, a2 = times(a0, a1, a2, b0[:, None], b1[:, None], b2[:, None])
    f0, f1, f2 = times(a0[:, :, None], a1[:, :, None], a2[:, :, None], l0, l1, l2)
    return tl.sum(f0, 1) / rank, tl.sum(f1, 1) / rank, tl.sum(f2, 1) / rank


@triton.jit
def flow_along_kernel(
    own, own1, own2, other, other1, other2, source, source1, source2, target, target1, target2,
    scalar_weight, scalar_bias, lambda_weight, lambda_bias, own_mask, other_mask, turn, out, out1, out2,
    own_head, other_head, source_head, target_head,
    heads, batch, num_own, num_other, num_tiles, num_steps, window, rank, head_width, num_hidden, num_targets,
    SECOND: tl.constexpr, BOTH: tl.constexpr, COMPLETE: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, TURNED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Write g, g′ and g″ (H, K, B, N) for a tile, as `flow_kernel`.

    Args:
        own … target2: node tensors with two derivatives, in equal layouts.
        scalar_weight … lambda_bias: weights, with a leading axis for value and two derivatives.
        own_mask, other_mask, turn: as in `arguments`.
        out, out1, out2: outputs.
        own_head … num_targets: strides and sizes as in `arguments`.
        SECOND: whether W_Λ″ is not zero.
        BOTH … SMALLEST: constants as in `settings`.
    """
    tile, b, h = place_of_program(num_tiles, batch)
    halo = window if BOTH else 0
    own_M = tile * (M - halo) - halo + tl.arange(0, M)
    width_K = tl.arange(0, K)
    own_step, other_step = tl.cast(batch, tl.int64) * num_own, tl.cast(batch, tl.int64) * num_other
    at_own_signal, at_other_signal = h * own_head + b * num_own, h * other_head + b * num_other
    at_source, at_target = h * source_head + b * num_own, h * target_head + b * num_other
    num_scalars = 2 if RANKED else 1
    of_scalars, of_lambda = heads * num_scalars, heads * rank * head_width
    scalar_weight, scalar_bias = scalar_weight + h * num_scalars * num_hidden, scalar_bias + h * num_scalars
    lambda_weight, lambda_bias = lambda_weight + h * rank * head_width * num_hidden, lambda_bias + h * rank * head_width
    rank_or_one = rank if RANKED else 1
    g0, g1, g2 = tl.zeros([M, K], WIDE), tl.zeros([M, K], WIDE), tl.zeros([M, K], WIDE)
    for step in range(num_steps):
        other_M = other_end(own_M, step, window, M, BOTH, COMPLETE)
        valid_M = edge_is_valid(
            own_mask + b * num_own, other_mask + b * num_other, own_M, other_M, num_own, num_other, OWN_MASKED,
            OTHER_MASKED,
        )  # fmt: skip
        d0 = read(own + at_own_signal, own_M, valid_M, width_K, head_width, own_step, WIDE)
        d1 = read(own1 + at_own_signal, own_M, valid_M, width_K, head_width, own_step, WIDE)
        d2 = read(own2 + at_own_signal, own_M, valid_M, width_K, head_width, own_step, WIDE)
        d0 -= read(other + at_other_signal, other_M, valid_M, width_K, head_width, other_step, WIDE)
        d1 -= read(other1 + at_other_signal, other_M, valid_M, width_K, head_width, other_step, WIDE)
        d2 -= read(other2 + at_other_signal, other_M, valid_M, width_K, head_width, other_step, WIDE)
        f0, f1, f2 = tl.zeros([M, K], WIDE), tl.zeros([M, K], WIDE), tl.zeros([M, K], WIDE)
        for direction in range(2 if BOTH else 1):
            if direction == 0:
                i0, i1, i2 = source + at_source, source1 + at_source, source2 + at_source
                j0, j1, j2 = target + at_target, target1 + at_target, target2 + at_target
            else:
                i0, i1, i2 = target + at_target, target1 + at_target, target2 + at_target
                j0, j1, j2 = source + at_source, source1 + at_source, source2 + at_source
            e0, e1, e2 = d0, d1, d2
            if TURNED:
                cos_MK, sin_MK = read_turn(
                    turn, own_M, other_M, valid_M, width_K, head_width, num_targets, direction, tl.constexpr(True),
                    WIDE,
                )  # fmt: skip
                e0 = rotate_back(d0, cos_MK, sin_MK, width_K, head_width, M, K)
                e1 = rotate_back(d1, cos_MK, sin_MK, width_K, head_width, M, K)
                e2 = rotate_back(d2, cos_MK, sin_MK, width_K, head_width, M, K)
            for row in range(0, rank_or_one, ROWS):
                a0 = tl.zeros([M], WIDE) + tl.load(scalar_bias).to(WIDE)
                a1 = tl.zeros([M], WIDE) + tl.load(scalar_bias + of_scalars).to(WIDE)
                a2 = tl.zeros([M], WIDE) + tl.load(scalar_bias + 2 * of_scalars).to(WIDE)
                b0, b1, b2 = tl.zeros([M], WIDE), tl.zeros([M], WIDE), tl.zeros([M], WIDE)
                l0 = tl.zeros([M, ROWS * K], WIDE)
                l1, l2 = tl.zeros([M, ROWS * K], WIDE), tl.zeros([M, ROWS * K], WIDE)
                if RANKED:
                    b0 += tl.load(scalar_bias + 1).to(WIDE)
                    b1 += tl.load(scalar_bias + of_scalars + 1).to(WIDE)
                    b2 += tl.load(scalar_bias + 2 * of_scalars + 1).to(WIDE)
                for first in range(0, num_hidden, X):
                    hidden_X = first + tl.arange(0, X)
                    z0, z1, z2 = gelu_of(
                        preactivation(
                            i0, j0, own_M, other_M, valid_M, hidden_X, num_hidden, own_step, other_step, WIDE
                        ),
                        preactivation(
                            i1, j1, own_M, other_M, valid_M, hidden_X, num_hidden, own_step, other_step, WIDE
                        ),
                        preactivation(
                            i2, j2, own_M, other_M, valid_M, hidden_X, num_hidden, own_step, other_step, WIDE
                        ),
                    )
                    p0, p1, p2 = scalar_along(
                        z0, z1, z2, scalar_weight, hidden_X, num_hidden, of_scalars * num_hidden, WIDE
                    )
                    a0, a1, a2 = a0 + p0, a1 + p1, a2 + p2
                    if RANKED:
                        p0, p1, p2 = scalar_along(
                            z0, z1, z2, scalar_weight + num_hidden, hidden_X, num_hidden, of_scalars * num_hidden, WIDE
                        )
                        b0, b1, b2 = b0 + p0, b1 + p1, b2 + p2
                        p0, p1, p2 = product_along(
                            z0, z1, z2, lambda_weight, row, hidden_X, rank, head_width, num_hidden,
                            of_lambda * num_hidden, ROWS, K, EVEN, SECOND, MATRIX, WIDE, PRECISION,
                        )  # fmt: skip
                        l0, l1, l2 = l0 + p0, l1 + p1, l2 + p2
                if row == 0:
                    a0, a1, a2 = softplus_of(a0, a1, a2)
                    p0, p1, p2 = times(a0[:, None], a1[:, None], a2[:, None], e0, e1, e2)
                    f0, f1, f2 = f0 + p0, f1 + p1, f2 + p2
                if RANKED:
                    l0 += read_lambda_bias(lambda_bias, row, rank, head_width, ROWS, K, WIDE)[None, :]
                    l1 += read_lambda_bias(lambda_bias + of_lambda, row, rank, head_width, ROWS, K, WIDE)[None, :]
                    l2 += read_lambda_bias(lambda_bias + 2 * of_lambda, row, rank, head_width, ROWS, K, WIDE)[None, :]
                    p0, p1, p2 = anisotropic_of(
                        b0, b1, b2, tl.reshape(l0, [M, ROWS, K]), tl.reshape(l1, [M, ROWS, K]),
                        tl.reshape(l2, [M, ROWS, K]), e0, e1, e2, rank, SMALLEST,
                    )  # fmt: skip
                    f0, f1, f2 = f0 + p0, f1 + p1, f2 + p2
        g0, g1, g2 = g0 + f0, g1 + f1, g2 + f2
        if BOTH:
            g0 -= shift_down(f0, step + 1, M, K)
            g1 -= shift_down(f1, step + 1, M, K)
            g2 -= shift_down(f2, step + 1, M, K)
    kept_M = (own_M >= tile * (M - halo)) & (own_M < num_own)
    at_out = h * head_width * own_step + b * num_own
    write(out + at_out, g0, own_M, kept_M, width_K, head_width, own_step)
    write(out1 + at_out, g1, own_M, kept_M, width_K, head_width, own_step)
    write(out2 + at_out, g2, own_M, kept_M, width_K, head_width, own_step)
