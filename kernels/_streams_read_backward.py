# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
"""Compute the gradients of `kernels._streams_read` in two passes over X.

First the gradient by each token's logits, with sums over all channels, then those by X and the weights. No sum depends
on the order of programs.
"""

import triton
import triton.language as tl

from kernels._streams_join import tile_of
from kernels._streams_mixing import normalise, pad_matrices, product, sinkhorn_backward, tanh
from kernels._streams_read import gate_places, mix_columns, permutations


@triton.jit
def gradient_of_pre(
    X, DU, token, T, C, N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return Σ_c du_c X_sc for a block of tokens, (B, S).

    Args:
        X: streams.
        DU: the gradient by u.
        token: tokens.
        T, C, N, NP, BLOCK_T, BLOCK_C: sizes.
        dtype: of the sums.
    """
    s = tl.arange(0, NP)
    d_pre_BS = tl.zeros((BLOCK_T, NP), dtype)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (token < T)[:, None] & (c < C)[None, :]
        x_BSC = tile_of(X, token, c, s, T, C, N, dtype)
        du_BC = tl.load(DU + token[:, None] * C + c[None, :], live, other=0.0).to(dtype)
        d_pre_BS += tl.sum(x_BSC * du_BC[:, None, :], 2)
    return d_pre_BS


@triton.jit
def gated_logits_backward(
    X, DU, COEFFICIENTS, DCOEFFICIENTS, Z, BIAS, P, DZ, ALONG, HISTORY, T, C, R,
    N: tl.constexpr, NP: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, LITE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write dz and ⟨dz, z − bias⟩ for the norm's gradient.

    Shapes (T, 2N + R) and (T,). Softmax and Sinkhorn's iterations are recomputed from z.

    Args:
        X, DU: streams, and the gradient by u.
        COEFFICIENTS, DCOEFFICIENTS: with their gradient.
        Z, BIAS, P: as in `read_gated`.
        DZ, ALONG: outputs.
        HISTORY: memory for `sinkhorn_backward`.
        T, C, R, N, NP, GP, RP, K, LITE, BLOCK_T, BLOCK_C, WIDE: as in `read_gated`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    token = first + tl.arange(0, BLOCK_T)
    live, outputs = token < T, 2 * N + R
    s, gate, column, entry = tl.arange(0, NP), tl.arange(0, GP), tl.arange(0, RP), tl.arange(0, NP * NP)
    dtype = DZ.dtype.element_ty
    base, row = token * (N * (N + 2)), token * outputs

    d_pre_BS = gradient_of_pre(X, DU, token, T, C, N, NP, BLOCK_T, BLOCK_C, dtype)
    known = live[:, None] & (gate < 2 * N)[None, :]
    place = base[:, None] + gate_places(gate, N)[None, :]
    d_gates = tl.load(DCOEFFICIENTS + place, known, other=0.0)
    d_gates += tl.sum(tl.where(gate[None, None, :] == s[None, :, None], d_pre_BS[:, :, None], 0.0), 1)
    top = tl.where(gate < N, 1.0, 2.0).to(dtype)[None, :]
    gates = tl.load(COEFFICIENTS + place, known, other=0.0)
    dz_gates = d_gates * gates * (1 - gates / top)
    z_gates = tl.load(Z + row[:, None] + gate[None, :], known, other=0.0)
    y_gates = z_gates - tl.load(BIAS + gate, gate < 2 * N, other=0.0)[None, :]
    tl.store(DZ + row[:, None] + gate[None, :], dz_gates, known)
    along = tl.sum(dz_gates * y_gates, 1)

    if LITE:
        option, there = mix_columns(column, R, N, NP, LITE)
        known = live[:, None] & there[None, :]
        z = tl.load(Z + row[:, None] + 2 * N + option[None, :], known, other=0.0)
        weights = normalise(tl.where(there[None, :], z, float("-inf")), 1)
        from_stream, to_stream = entry[None, :] // NP, entry[None, :] % NP
        inside = live[:, None] & (from_stream < N) & (to_stream < N)
        d_mix = tl.load(
            DCOEFFICIENTS + base[:, None] + from_stream * (N + 2) + 1 + to_stream, inside, other=0.0
        )  # fmt: skip
        d_weights = product(d_mix, tl.trans(permutations(P, column, entry, R, N, NP).to(dtype)), WIDE, "ieee")
        dz = weights * (d_weights - tl.sum(weights * d_weights, 1)[:, None])
        y = z - tl.load(BIAS + 2 * N + option, there, other=0.0)[None, :]
        tl.store(DZ + row[:, None] + 2 * N + option[None, :], dz, known)
        along += tl.sum(dz * y, 1)
    else:
        from_STB, to_STB = s[:, None, None], s[None, :, None]
        inside = (from_STB < N) & (to_STB < N) & live[None, None, :]
        option = from_STB * N + to_STB
        z = tl.load(Z + row[None, None, :] + 2 * N + option, inside, other=0.0)
        d_mix = tl.load(DCOEFFICIENTS + base[None, None, :] + from_STB * (N + 2) + 1 + to_STB, inside, other=0.0)
        room = HISTORY + tl.program_id(0).to(tl.int64) * (2 * K * NP * BLOCK_T)
        dz = sinkhorn_backward(pad_matrices(z, from_STB, to_STB, N), d_mix, room, K, NP, BLOCK_T)
        y = z - tl.load(BIAS + 2 * N + option, (from_STB < N) & (to_STB < N), other=0.0)
        tl.store(DZ + row[None, None, :] + 2 * N + option, dz, inside)
        along += tl.sum(tl.sum(tl.where(inside, dz * y, 0.0), 0), 0)
    tl.store(ALONG + token, along, live)


@triton.jit
def hyper_logits_backward(
    X, DU, DCOEFFICIENTS, Z, AMPLITUDE, TOTAL, DZ, ALONG, T, C,
    N: tl.constexpr, NP: tl.constexpr, OP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write the total gradient by the coefficients, dz and ⟨dz, z⟩ (T, N).

    The total includes du's part; total and dz are (T, N, N + 2).

    Args:
        X, DU: streams, and the gradient by u.
        DCOEFFICIENTS: the direct gradient by the coefficients.
        Z, AMPLITUDE: as in `read_hyper`.
        TOTAL, DZ, ALONG: outputs.
        T, C, N, NP, OP, BLOCK_T, BLOCK_C, WIDE: as in `read_hyper`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    s, o = tl.arange(0, NP), tl.arange(0, OP)
    dtype = DZ.dtype.element_ty
    d_pre_BS = gradient_of_pre(X, DU, token, T, C, N, NP, BLOCK_T, BLOCK_C, dtype)
    known = (token < T)[:, None, None] & (s < N)[None, :, None] & (o < N + 2)[None, None, :]
    row = token[:, None] * N + s[None, :]
    place = row[:, :, None] * (N + 2) + o[None, None, :]
    total = tl.load(DCOEFFICIENTS + place, known, other=0.0)
    total += tl.where((o == 0)[None, None, :], d_pre_BS[:, :, None], 0.0)
    z = tl.load(Z + place, known, other=0.0)
    h = tanh(z, WIDE)
    dz = total * tl.load(AMPLITUDE + o, o < N + 2, other=0.0)[None, None, :] * (1 - h * h)
    tl.store(TOTAL + place, total, known)
    tl.store(DZ + place, dz, known)
    tl.store(ALONG + row, tl.sum(dz * z, 2), (token < T)[:, None] & (s < N)[None, :])


@triton.jit
def read_backward(
    X, W, DZ, ROOT, ALONG, DU, COEFFICIENTS, THROUGH, DX, DW, T, C, outputs, tokens,
    N: tl.constexpr, PER_STREAM: tl.constexpr, OP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dX and this program's part of dW.

    dX = (dz Wᵀ)/r − x ⟨dz, y⟩/(r² G) + pre du + through and dW = xᵀ dz/r, with y = xW/r, r² = mean x² + ε over G
    numbers. A program has some channels of one stream and ``tokens`` tokens, part number ``program_id(1)``.

    Args:
        X, W: streams and weights.
        DZ, ROOT, ALONG: dz, 1/r and ⟨dz, y⟩.
        DU, COEFFICIENTS: the gradient by u, and the coefficients.
        THROUGH: the gradient by the returned X.
        DX, DW: outputs; DW (parts, N·C, O).
        T, C, outputs, tokens: sizes; ``tokens`` per part.
        PER_STREAM: each stream has its own norm, z (T, N, O) and W (C, O); else one norm, z (T, O) and W (N·C, O).
        N, OP, BLOCK_T, BLOCK_C, WIDE, PRECISION: as in `read_hyper`.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    stream = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    o = tl.arange(0, OP)
    dtype = ROOT.dtype.element_ty
    weight_row = (c if PER_STREAM else stream * C + c).to(tl.int64)
    known = (c < C)[:, None] & (o < outputs)[None, :]
    w_CO = tl.load(W + weight_row[:, None] * outputs + o[None, :], known, other=0.0)
    size = C if PER_STREAM else N * C
    d_w_CO = tl.zeros((BLOCK_C, OP), dtype)
    begin = tl.program_id(1).to(tl.int64) * tokens
    for start in range(0, tokens, BLOCK_T):
        offset = start + tl.arange(0, BLOCK_T)
        token = begin + offset
        live = (offset < tokens) & (token < T)
        row = token * N + stream if PER_STREAM else token
        root = tl.load(ROOT + row, live, other=0.0)
        along = tl.load(ALONG + row, live, other=0.0)
        dz = tl.load(DZ + row[:, None] * outputs + o[None, :], live[:, None] & (o < outputs)[None, :], other=0.0)
        dz = dz * root[:, None]
        inside = live[:, None] & (c < C)[None, :]
        place = (token[:, None] * N + stream) * C + c[None, :]
        x = tl.load(X + place, inside, other=0.0).to(dtype)
        du = tl.load(DU + token[:, None] * C + c[None, :], inside, other=0.0).to(dtype)
        through = tl.load(THROUGH + place, inside, other=0.0).to(dtype)
        pre = tl.load(COEFFICIENTS + (token * N + stream) * (N + 2), live, other=0.0)
        d_x = product(dz, tl.trans(w_CO), WIDE, PRECISION) - x * (along * root * root / size)[:, None]
        tl.store(DX + place, (d_x + pre[:, None] * du + through).to(DX.dtype.element_ty), inside)
        d_w_CO += product(tl.trans(x), dz, WIDE, PRECISION)
    part = (tl.program_id(1).to(tl.int64) * N + stream) * C + c
    tl.store(DW + part[:, None] * outputs + o[None, :], d_w_CO, known)
