# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
"""Compute `kernels._streams_read` along a line, to second order.

Each tensor T is passed and written as T, T1, T2: its value and two derivatives.
"""

import triton
import triton.language as tl

from kernels._streams_mixing import (
    pad_matrices,
    product,
    root_taylor,
    sigmoid_taylor,
    sinkhorn_taylor,
    softmax_taylor,
    tanh_taylor,
)
from kernels._streams_read import gate_places, mix_columns, permutations, store_mix


@triton.jit
def load_tiles(A, A1, A2, place, known, dtype: tl.constexpr):
    """Return a value and its derivatives as tiles from the same place.

    Args:
        A, A1, A2: pointers.
        place: offsets.
        known: mask.
        dtype: of the tiles.
    """
    value = tl.load(A + place, known, other=0.0).to(dtype)
    first = tl.load(A1 + place, known, other=0.0).to(dtype)
    second = tl.load(A2 + place, known, other=0.0).to(dtype)
    return value, first, second


@triton.jit
def product_taylor(x, x1, x2, w, w1, w2, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return xw, (xw)′ and (xw)″.

    Args:
        x, x1, x2: x, x′, x″.
        w, w1, w2: w, w′, w″.
        WIDE, PRECISION: as in `product`.
    """
    value = product(x, w, WIDE, PRECISION)
    first = product(x1, w, WIDE, PRECISION) + product(x, w1, WIDE, PRECISION)
    cross = product(x1, w1, WIDE, PRECISION)
    second = product(x2, w, WIDE, PRECISION) + 2 * cross + product(x, w2, WIDE, PRECISION)
    return value, first, second


@triton.jit
def read_streams_taylor(
    X, X1, X2, U, U1, U2, pre, pre1, pre2, token, T, C, N: tl.constexpr, NP: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write u = Σ_s pre_s X_s for a block of tokens, u′ and u″.

    Args:
        X, X1, X2: streams.
        U, U1, U2: outputs.
        pre, pre1, pre2: coefficients.
        token, T, C, N, NP, BLOCK_C: as in `read_streams`.
    """
    s = tl.arange(0, NP)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (token < T)[:, None] & (c < C)[None, :]
        there = live[:, None, :] & (s < N)[None, :, None]
        place = ((token[:, None] * N + s[None, :]) * C)[:, :, None] + c[None, None, :]
        x, x1, x2 = load_tiles(X, X1, X2, place, there, pre.dtype)
        u = tl.sum(pre[:, :, None] * x, 1)
        u1 = tl.sum(pre1[:, :, None] * x + pre[:, :, None] * x1, 1)
        u2 = tl.sum(pre2[:, :, None] * x + 2 * pre1[:, :, None] * x1 + pre[:, :, None] * x2, 1)
        out = token[:, None] * C + c[None, :]
        tl.store(U + out, u.to(U.dtype.element_ty), live)
        tl.store(U1 + out, u1.to(U.dtype.element_ty), live)
        tl.store(U2 + out, u2.to(U.dtype.element_ty), live)


@triton.jit
def select_pre_gates(gates, gate, s):
    """Return pre's gates, (B, S), from those of pre and post.

    Args:
        gates: (B, GP).
        gate: their numbers.
        s: streams.
    """
    return tl.sum(tl.where(gate[None, :, None] == s[None, None, :], gates[:, :, None], 0.0), 1)


@triton.jit
def read_gated_taylor(
    X, X1, X2, W, W1, W2, BIAS, BIAS1, BIAS2, P, U, U1, U2, A, A1, A2, T, C, R, epsilon,
    N: tl.constexpr, NP: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, LITE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write u and the coefficients A of `read_gated` with two derivatives.

    Args:
        X … BIAS2: inputs with two derivatives.
        P: as in `read_gated`.
        U, U1, U2, A, A1, A2: outputs.
        T … PRECISION: as in `read_gated`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live, size, outputs = token < T, N * C, 2 * N + R
    gate, column = tl.arange(0, GP), tl.arange(0, RP)
    option, there = mix_columns(column, R, N, NP, LITE)
    dtype = A.dtype.element_ty
    s0 = tl.zeros((BLOCK_T, BLOCK_C), dtype)
    s1, s2 = s0, s0
    g0 = tl.zeros((BLOCK_T, GP), dtype)
    g1, g2 = g0, g0
    m0 = tl.zeros((BLOCK_T, RP), dtype)
    m1, m2 = m0, m0
    for start in range(0, size, BLOCK_C):
        g = start + tl.arange(0, BLOCK_C)
        inside = live[:, None] & (g < size)[None, :]
        x, x1, x2 = load_tiles(X, X1, X2, token[:, None] * size + g[None, :], inside, dtype)
        s0 += x * x
        s1 += 2 * x * x1
        s2 += 2 * (x1 * x1 + x * x2)
        row = g[:, None].to(tl.int64) * outputs
        known = (g < size)[:, None] & (gate < 2 * N)[None, :]
        w, w1, w2 = load_tiles(W, W1, W2, row + gate[None, :], known, dtype)
        y, y1, y2 = product_taylor(x, x1, x2, w, w1, w2, WIDE, PRECISION)
        g0, g1, g2 = g0 + y, g1 + y1, g2 + y2
        known = (g < size)[:, None] & there[None, :]
        w, w1, w2 = load_tiles(W, W1, W2, row + 2 * N + option[None, :], known, dtype)
        y, y1, y2 = product_taylor(x, x1, x2, w, w1, w2, WIDE, PRECISION)
        m0, m1, m2 = m0 + y, m1 + y1, m2 + y2
    q0, q1, q2 = tl.sum(s0, 1) / size + epsilon, tl.sum(s1, 1) / size, tl.sum(s2, 1) / size
    g0, g1, g2 = root_taylor(g0, g1, g2, q0, q1, q2)
    m0, m1, m2 = root_taylor(m0, m1, m2, q0, q1, q2)
    b, b1, b2 = load_tiles(BIAS, BIAS1, BIAS2, gate, gate < 2 * N, dtype)
    g0, g1, g2 = sigmoid_taylor(g0 + b[None, :], g1 + b1[None, :], g2 + b2[None, :])
    b, b1, b2 = load_tiles(BIAS, BIAS1, BIAS2, 2 * N + option, there, dtype)
    m0, m1, m2 = m0 + b[None, :], m1 + b1[None, :], m2 + b2[None, :]

    top = tl.where(gate < N, 1.0, 2.0).to(dtype)[None, :]
    g0, g1, g2 = g0 * top, g1 * top, g2 * top
    base, known = token * (N * (N + 2)), live[:, None] & (gate < 2 * N)[None, :]
    place = base[:, None] + gate_places(gate, N)[None, :]
    tl.store(A + place, g0, known)
    tl.store(A1 + place, g1, known)
    tl.store(A2 + place, g2, known)
    s, entry = tl.arange(0, NP), tl.arange(0, NP * NP)
    if LITE:
        p0, p1, p2 = softmax_taylor(tl.where(there[None, :], m0, float("-inf")), m1, m2)
        matrices = permutations(P, column, entry, R, N, NP).to(dtype)
        from_, to, at, ok = entry[None, :] // NP, entry[None, :] % NP, base[:, None], live[:, None]
        store_mix(A, product(p0, matrices, WIDE, "ieee"), at, ok, from_, to, N)
        store_mix(A1, product(p1, matrices, WIDE, "ieee"), at, ok, from_, to, N)
        store_mix(A2, product(p2, matrices, WIDE, "ieee"), at, ok, from_, to, N)
    else:
        from_, to, at, ok = s[:, None, None], s[None, :, None], base[None, None, :], live[None, None, :]
        m0 = pad_matrices(tl.reshape(tl.trans(m0), (NP, NP, BLOCK_T)), from_, to, N)
        m1, m2 = tl.reshape(tl.trans(m1), (NP, NP, BLOCK_T)), tl.reshape(tl.trans(m2), (NP, NP, BLOCK_T))
        a0, a1, a2 = sinkhorn_taylor(m0, m1, m2, K, NP, BLOCK_T)
        store_mix(A, a0, at, ok, from_, to, N)
        store_mix(A1, a1, at, ok, from_, to, N)
        store_mix(A2, a2, at, ok, from_, to, N)
    pre, pre1, pre2 = select_pre_gates(g0, gate, s), select_pre_gates(g1, gate, s), select_pre_gates(g2, gate, s)
    read_streams_taylor(X, X1, X2, U, U1, U2, pre, pre1, pre2, token, T, C, N, NP, BLOCK_C)


@triton.jit
def read_hyper_taylor(
    X, X1, X2, W, W1, W2, B, B1, B2, H, H1, H2, U, U1, U2, A, A1, A2, T, C, epsilon,
    N: tl.constexpr, NP: tl.constexpr, OP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write u and the coefficients A of `read_hyper` with two derivatives.

    Args:
        X … W2: inputs with two derivatives.
        B, B1, B2: static.
        H, H1, H2: amplitude.
        U, U1, U2, A, A1, A2: outputs.
        T … PRECISION: as in `read_hyper`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    flat = tl.arange(0, BLOCK_T * NP)
    stream, outputs = flat % NP, N + 2
    row_token = tl.program_id(0).to(tl.int64) * BLOCK_T + flat // NP
    row, live = row_token * N + stream, (row_token < T) & (stream < N)
    o = tl.arange(0, OP)
    dtype = A.dtype.element_ty
    s0 = tl.zeros((BLOCK_T * NP, BLOCK_C), dtype)
    s1, s2 = s0, s0
    z0 = tl.zeros((BLOCK_T * NP, OP), dtype)
    z1, z2 = z0, z0
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x, x1, x2 = load_tiles(
            X, X1, X2, row[:, None] * C + c[None, :], live[:, None] & (c < C)[None, :], dtype
        )  # fmt: skip
        s0 += x * x
        s1 += 2 * x * x1
        s2 += 2 * (x1 * x1 + x * x2)
        known = (c < C)[:, None] & (o < outputs)[None, :]
        w, w1, w2 = load_tiles(W, W1, W2, c[:, None] * outputs + o[None, :], known, dtype)
        y, y1, y2 = product_taylor(x, x1, x2, w, w1, w2, WIDE, PRECISION)
        z0, z1, z2 = z0 + y, z1 + y1, z2 + y2
    z0, z1, z2 = root_taylor(z0, z1, z2, tl.sum(s0, 1) / C + epsilon, tl.sum(s1, 1) / C, tl.sum(s2, 1) / C)
    z0, z1, z2 = tanh_taylor(z0, z1, z2, WIDE)
    known = live[:, None] & (o < outputs)[None, :]
    b, b1, b2 = load_tiles(B, B1, B2, stream[:, None] * outputs + o[None, :], known, dtype)
    h, h1, h2 = load_tiles(H, H1, H2, o[None, :], (o < outputs)[None, :], dtype)
    a, a1, a2 = b + h * z0, b1 + h1 * z0 + h * z1, b2 + h2 * z0 + 2 * h1 * z1 + h * z2
    place, first = row[:, None] * outputs + o[None, :], (o == 0)[None, :]
    tl.store(A + place, a, known)
    tl.store(A1 + place, a1, known)
    tl.store(A2 + place, a2, known)
    pre = tl.reshape(tl.sum(tl.where(first, a, 0.0), 1), (BLOCK_T, NP))
    pre1 = tl.reshape(tl.sum(tl.where(first, a1, 0.0), 1), (BLOCK_T, NP))
    pre2 = tl.reshape(tl.sum(tl.where(first, a2, 0.0), 1), (BLOCK_T, NP))
    read_streams_taylor(X, X1, X2, U, U1, U2, pre, pre1, pre2, token, T, C, N, NP, BLOCK_C)
