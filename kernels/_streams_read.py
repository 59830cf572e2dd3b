# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
"""Read the streams X (T, N, C) of a connection: coefficients and the branch's input.

One pass over X computes the logits and the sum of squares, then the coefficients; a second pass, over cached data,
computes u = Σ_s pre_s X_s. A token's coefficients are (N, N + 2) numbers: pre_s, mix_s1 … mix_sN and post_s in row s.
Sizes: NP streams, GP gates, RP mixing logits and OP outputs, padded; BLOCK_T tokens and BLOCK_C channels per tile.
"""

import triton
import triton.language as tl

from kernels._streams_mixing import normalise, pad_matrices, product, sinkhorn, tanh


@triton.jit
def gate_places(gate, N: tl.constexpr):
    """Return the gates' indices in a token's coefficients: pre of each stream, then post."""
    return tl.where(gate < N, gate * (N + 2), (gate - N) * (N + 2) + N + 1)


@triton.jit
def mix_columns(column, R, N: tl.constexpr, NP: tl.constexpr, LITE: tl.constexpr):
    """Return each padded column's mixing logit, and whether there is one.

    Args:
        column: columns of the padded tile.
        R: number of logits.
        N: number of streams.
        NP: padded streams.
        LITE: columns are R permutations; else entries of a padded matrix.
    """
    option, there = column, column < R
    if not LITE:
        option, there = (column // NP) * N + column % NP, (column // NP < N) & (column % NP < N)
    return option, there


@triton.jit
def read_streams(X, U, pre_BS, token, T, C, N: tl.constexpr, NP: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write u = Σ_s pre_s X_s for a block of tokens.

    Args:
        X: streams.
        U: output.
        pre_BS: coefficients.
        token: tokens.
        T, C, N, NP, BLOCK_C: sizes.
    """
    s = tl.arange(0, NP)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (token < T)[:, None] & (c < C)[None, :]
        there = live[:, None, :] & (s < N)[None, :, None]
        x_BSC = tl.load(X + ((token[:, None] * N + s[None, :]) * C)[:, :, None] + c[None, None, :], there, other=0.0)
        u_BC = tl.sum(pre_BS[:, :, None] * x_BSC.to(pre_BS.dtype), 1)
        tl.store(U + token[:, None] * C + c[None, :], u_BC.to(U.dtype.element_ty), live)


@triton.jit
def store_mix(COEFFICIENTS, mix, base, live, s, t, N: tl.constexpr):
    """Write mixing matrices.

    Args:
        COEFFICIENTS: output.
        mix: the tile; all others broadcast against it.
        base: index of each token's first coefficient.
        live: whether a token exists.
        s: streams read.
        t: streams written.
        N: number of streams.
    """
    tl.store(COEFFICIENTS + base + s * (N + 2) + 1 + t, mix, live & (s < N) & (t < N))


@triton.jit
def read_gated(
    X, W, BIAS, P, U, COEFFICIENTS, Z, ROOT, T, C, R, epsilon,
    N: tl.constexpr, NP: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, LITE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write u, coefficients, logits z and 1/√(…) of mHC or mHC-lite.

    z = W̃ᵀx/√(mean x² + ε) + bias, x = vec X.

    Args:
        X: streams.
        W: (N·C, 2N + R), columns for pre, post and the mixing.
        BIAS: (2N + R,).
        P: permutation matrices (R, N²), with ``LITE``.
        U, COEFFICIENTS, Z, ROOT: outputs.
        T, C, R, epsilon: sizes and ε.
        K: Sinkhorn and Knopp's iterations over R = N² logits, without ``LITE``.
        N, NP, GP, RP, LITE, BLOCK_T, BLOCK_C, WIDE, PRECISION: constants as in the module and `product`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live, size, outputs = token < T, N * C, 2 * N + R
    gate, column = tl.arange(0, GP), tl.arange(0, RP)
    option, there = mix_columns(column, R, N, NP, LITE)
    dtype = ROOT.dtype.element_ty
    squares = tl.zeros((BLOCK_T, BLOCK_C), dtype)
    z_gates = tl.zeros((BLOCK_T, GP), dtype)
    z_mix = tl.zeros((BLOCK_T, RP), dtype)
    for start in range(0, size, BLOCK_C):
        g = start + tl.arange(0, BLOCK_C)
        x = tl.load(X + token[:, None] * size + g[None, :], live[:, None] & (g < size)[None, :], other=0.0).to(dtype)
        row = W + g[:, None].to(tl.int64) * outputs
        w_gates = tl.load(row + gate[None, :], (g < size)[:, None] & (gate < 2 * N)[None, :], other=0.0)
        w_mix = tl.load(row + 2 * N + option[None, :], (g < size)[:, None] & there[None, :], other=0.0)
        squares += x * x
        z_gates += product(x, w_gates, WIDE, PRECISION)
        z_mix += product(x, w_mix, WIDE, PRECISION)
    root = 1 / tl.sqrt(tl.sum(squares, 1) / size + epsilon)
    z_gates = z_gates * root[:, None] + tl.load(BIAS + gate, gate < 2 * N, other=0.0)[None, :]
    z_mix = z_mix * root[:, None] + tl.load(BIAS + 2 * N + option, there, other=0.0)[None, :]
    tl.store(ROOT + token, root, live)
    tl.store(Z + token[:, None] * outputs + gate[None, :], z_gates, live[:, None] & (gate < 2 * N)[None, :])
    tl.store(Z + token[:, None] * outputs + 2 * N + option[None, :], z_mix, live[:, None] & there[None, :])

    gates = tl.sigmoid(z_gates) * tl.where(gate < N, 1.0, 2.0).to(dtype)[None, :]
    place, base = gate_places(gate, N), token * (N * (N + 2))
    tl.store(COEFFICIENTS + base[:, None] + place[None, :], gates, live[:, None] & (gate < 2 * N)[None, :])
    s, entry = tl.arange(0, NP), tl.arange(0, NP * NP)
    if LITE:
        weights = normalise(tl.where(there[None, :], z_mix, float("-inf")), 1)
        matrices = permutations(P, column, entry, R, N, NP).to(dtype)
        mix = product(weights, matrices, WIDE, "ieee")
        store_mix(COEFFICIENTS, mix, base[:, None], live[:, None], entry[None, :] // NP, entry[None, :] % NP, N)
    else:
        from_STB, to_STB = s[:, None, None], s[None, :, None]
        logits = pad_matrices(tl.reshape(tl.trans(z_mix), (NP, NP, BLOCK_T)), from_STB, to_STB, N)
        mix = sinkhorn(logits, K, NP, BLOCK_T)
        store_mix(COEFFICIENTS, mix, base[None, None, :], live[None, None, :], from_STB, to_STB, N)
    pre_BS = tl.sum(tl.where(gate[None, :, None] == s[None, None, :], gates[:, :, None], 0.0), 1)
    read_streams(X, U, pre_BS, token, T, C, N, NP, BLOCK_C)


@triton.jit
def permutations(P, option, entry, R, N: tl.constexpr, NP: tl.constexpr):
    """Return P (R, N²) with both axes padded.

    Args:
        P: permutation matrices.
        option: permutations, rows of the tile.
        entry: entries of padded matrices, its columns.
        R: number of permutations.
        N: number of streams.
        NP: padded streams.
    """
    s, t = entry[None, :] // NP, entry[None, :] % NP
    return tl.load(P + option[:, None] * (N * N) + s * N + t, (option < R)[:, None] & (s < N) & (t < N), other=0.0)


@triton.jit
def read_hyper(
    X, W, STATIC, AMPLITUDE, U, COEFFICIENTS, Z, ROOT, T, C, epsilon,
    N: tl.constexpr, NP: tl.constexpr, OP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write u, coefficients, logits z and 1/√(…) of hyper-connections.

    z = W̃ᵀx/√(mean x² + ε) for each stream x; the coefficients are static + amplitude·tanh z.

    Args:
        X: streams.
        W: (C, N + 2).
        STATIC: (N, N + 2).
        AMPLITUDE: (N + 2,).
        U, COEFFICIENTS, Z, ROOT: outputs.
        T, C, epsilon: sizes and ε.
        N, NP, OP, BLOCK_T, BLOCK_C, WIDE, PRECISION: constants as in the module and `product`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    # each stream of each token is a row; NP rows per token
    flat = tl.arange(0, BLOCK_T * NP)
    stream, outputs = flat % NP, N + 2
    row_token = tl.program_id(0).to(tl.int64) * BLOCK_T + flat // NP
    row, live = row_token * N + stream, (row_token < T) & (stream < N)
    o = tl.arange(0, OP)
    dtype = ROOT.dtype.element_ty
    squares = tl.zeros((BLOCK_T * NP, BLOCK_C), dtype)
    z = tl.zeros((BLOCK_T * NP, OP), dtype)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x = tl.load(X + row[:, None] * C + c[None, :], live[:, None] & (c < C)[None, :], other=0.0).to(dtype)
        w = tl.load(W + c[:, None] * outputs + o[None, :], (c < C)[:, None] & (o < outputs)[None, :], other=0.0)
        squares += x * x
        z += product(x, w, WIDE, PRECISION)
    root = 1 / tl.sqrt(tl.sum(squares, 1) / C + epsilon)
    z = z * root[:, None]
    known = live[:, None] & (o < outputs)[None, :]
    tl.store(ROOT + row, root, live)
    tl.store(Z + row[:, None] * outputs + o[None, :], z, known)
    static = tl.load(STATIC + stream[:, None] * outputs + o[None, :], known, other=0.0)
    found = static + tl.load(AMPLITUDE + o, o < outputs, other=0.0)[None, :] * tanh(z, WIDE)
    tl.store(COEFFICIENTS + row[:, None] * outputs + o[None, :], found, known)
    pre_BS = tl.reshape(tl.sum(tl.where(o[None, :] == 0, found, 0.0), 1), (BLOCK_T, NP))
    read_streams(X, U, pre_BS, token, T, C, N, NP, BLOCK_C)
