# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
"""Join a branch's output to the streams: forward, backward and second order along a line.

X'_t = X_t + Σ_s mix_st (X_s − X_t) + post_t F if mix's columns sum to 1 (``DIFFERENCES``): equal streams stay exactly
equal under any rounding of mix. Else X'_t = Σ_s mix_st X_s + post_t F. Sums are in float32 or wider. Sizes: N streams,
NP padded; BLOCK_T tokens and BLOCK_C channels per tile.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(X, token, c, s, T, C, N: tl.constexpr, dtype: tl.constexpr):
    """Return a tile (tokens, streams, channels) of X (T, N, C).

    Args:
        X: pointer.
        token: tokens.
        c: channels.
        s: streams.
        T: number of tokens.
        C: number of channels.
        N: number of streams.
        dtype: of the tile.
    """
    there = (token < T)[:, None, None] & (s < N)[None, :, None] & (c < C)[None, None, :]
    place = ((token[:, None] * N + s[None, :]) * C)[:, :, None] + c[None, None, :]
    return tl.load(X + place, there, other=0.0).to(dtype)


@triton.jit
def store_tile(X, x_BSC, token, c, s, T, C, N: tl.constexpr):
    """Write a tile (tokens, streams, channels) of X (T, N, C).

    Args:
        X: pointer.
        x_BSC: the tile.
        token: tokens.
        c: channels.
        s: streams.
        T: number of tokens.
        C: number of channels.
        N: number of streams.
    """
    there = (token < T)[:, None, None] & (s < N)[None, :, None] & (c < C)[None, None, :]
    place = ((token[:, None] * N + s[None, :]) * C)[:, :, None] + c[None, None, :]
    tl.store(X + place, x_BSC.to(X.dtype.element_ty), there)


@triton.jit
def row_of(x_BSC, s, index: tl.constexpr):
    """Return one stream of a tile.

    Args:
        x_BSC: the tile.
        s: its streams.
        index: the stream.
    """
    return tl.sum(tl.where((s == index)[None, :, None], x_BSC, 0.0), 1)


@triton.jit
def mix_row(COEFFICIENTS, index: tl.constexpr, token, t, T, N: tl.constexpr):
    """Return mix_st for one s and each t, (B, T).

    Args:
        COEFFICIENTS: pointer.
        index: s.
        token: tokens.
        t: streams.
        T: number of tokens.
        N: number of streams.
    """
    place = token[:, None] * (N * (N + 2)) + index * (N + 2) + 1 + t[None, :]
    return tl.load(COEFFICIENTS + place, (token < T)[:, None] & (t < N)[None, :], other=0.0)


@triton.jit
def mix_column(COEFFICIENTS, index: tl.constexpr, token, s, T, N: tl.constexpr):
    """Return mix_st for one t and each s, (B, S).

    Args:
        COEFFICIENTS: pointer.
        index: t.
        token: tokens.
        s: streams.
        T: number of tokens.
        N: number of streams.
    """
    place = token[:, None] * (N * (N + 2)) + s[None, :] * (N + 2) + 1 + index
    return tl.load(COEFFICIENTS + place, (token < T)[:, None] & (s < N)[None, :], other=0.0)


@triton.jit
def post_of(COEFFICIENTS, token, t, T, N: tl.constexpr):
    """Return post_t for each t, (B, T).

    Args:
        COEFFICIENTS: pointer.
        token: tokens.
        t: streams.
        T: number of tokens.
        N: number of streams.
    """
    place = token[:, None] * (N * (N + 2)) + t[None, :] * (N + 2) + N + 1
    return tl.load(COEFFICIENTS + place, (token < T)[:, None] & (t < N)[None, :], other=0.0)


@triton.jit
def mix_streams(
    x_BSC, COEFFICIENTS, token, s, T, N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    DIFFERENCES: tl.constexpr,
):  # fmt: skip
    """Return Σ_s mix_st X_s for each t, or Σ_s mix_st (X_s − X_t).

    Args:
        x_BSC: the streams.
        COEFFICIENTS, token, s, T: as in `mix_row`.
        N, NP, BLOCK_T, BLOCK_C: sizes.
        DIFFERENCES: the second form.
    """
    sum_BTC = tl.zeros((BLOCK_T, NP, BLOCK_C), x_BSC.dtype)
    for index in tl.static_range(N):
        x_BC = row_of(x_BSC, s, index)
        part_BTC = x_BC[:, None, :] - x_BSC if DIFFERENCES else x_BC[:, None, :]
        sum_BTC += mix_row(COEFFICIENTS, index, token, s, T, N)[:, :, None] * part_BTC
    return sum_BTC


@triton.jit
def join(
    X, COEFFICIENTS, ADDED, OUT, T, C,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, DIFFERENCES: tl.constexpr,
):  # fmt: skip
    """Write X' (T, N, C).

    Args:
        X: streams (T, N, C).
        COEFFICIENTS: (T, N, N + 2).
        ADDED: branch outputs F (T, C).
        OUT: output.
        T, C, N, NP, BLOCK_T, BLOCK_C, DIFFERENCES: sizes and form.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c, s = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, NP)
    dtype = COEFFICIENTS.dtype.element_ty
    x_BSC = tile_of(X, token, c, s, T, C, N, dtype)
    live = (token < T)[:, None] & (c < C)[None, :]
    f_BC = tl.load(ADDED + token[:, None] * C + c[None, :], live, other=0.0).to(dtype)
    out_BTC = mix_streams(x_BSC, COEFFICIENTS, token, s, T, N, NP, BLOCK_T, BLOCK_C, DIFFERENCES)
    out_BTC += post_of(COEFFICIENTS, token, s, T, N)[:, :, None] * f_BC[:, None, :]
    if DIFFERENCES:
        out_BTC += x_BSC
    store_tile(OUT, out_BTC, token, c, s, T, C, N)


@triton.jit
def join_taylor(
    X, X1, X2, A, A1, A2, F, F1, F2, OUT, OUT1, OUT2, T, C,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, DIFFERENCES: tl.constexpr,
):  # fmt: skip
    """Write X' and two derivatives along a line.

    Args:
        X, X1, X2: streams and two derivatives.
        A, A1, A2: coefficients.
        F, F1, F2: branch outputs.
        OUT, OUT1, OUT2: outputs.
        T, C, N, NP, BLOCK_T, BLOCK_C, DIFFERENCES: sizes and form.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c, s = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, NP)
    dtype = A.dtype.element_ty
    live = (token < T)[:, None] & (c < C)[None, :]
    place = token[:, None] * C + c[None, :]
    x, x1, x2 = (
        tile_of(X, token, c, s, T, C, N, dtype),
        tile_of(X1, token, c, s, T, C, N, dtype),
        tile_of(X2, token, c, s, T, C, N, dtype),
    )
    f, f1, f2 = (
        tl.load(F + place, live, other=0.0).to(dtype)[:, None, :],
        tl.load(F1 + place, live, other=0.0).to(dtype)[:, None, :],
        tl.load(F2 + place, live, other=0.0).to(dtype)[:, None, :],
    )
    b, b1, b2 = (
        post_of(A, token, s, T, N)[:, :, None],
        post_of(A1, token, s, T, N)[:, :, None],
        post_of(A2, token, s, T, N)[:, :, None],
    )
    out, out1, out2 = b * f, b1 * f + b * f1, b2 * f + 2 * b1 * f1 + b * f2
    for index in tl.static_range(N):
        d, d1, d2 = (
            row_of(x, s, index)[:, None, :],
            row_of(x1, s, index)[:, None, :],
            row_of(x2, s, index)[:, None, :],
        )
        if DIFFERENCES:
            d, d1, d2 = d - x, d1 - x1, d2 - x2
        a, a1, a2 = (
            mix_row(A, index, token, s, T, N)[:, :, None],
            mix_row(A1, index, token, s, T, N)[:, :, None],
            mix_row(A2, index, token, s, T, N)[:, :, None],
        )
        out += a * d
        out1 += a1 * d + a * d1
        out2 += a2 * d + 2 * a1 * d1 + a * d2
    if DIFFERENCES:
        out, out1, out2 = out + x, out1 + x1, out2 + x2
    store_tile(OUT, out, token, c, s, T, C, N)
    store_tile(OUT1, out1, token, c, s, T, C, N)
    store_tile(OUT2, out2, token, c, s, T, C, N)


@triton.jit
def join_backward(
    X, COEFFICIENTS, ADDED, G, DX, DCOEFFICIENTS, DADDED, T, C,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, DIFFERENCES: tl.constexpr,
):  # fmt: skip
    """Write the gradients by X, coefficients (0 for pre) and F in one pass.

    Args:
        X, COEFFICIENTS, ADDED: the inputs.
        G: dL/dX'.
        DX, DCOEFFICIENTS, DADDED: outputs.
        T, C, N, NP, BLOCK_T, BLOCK_C, DIFFERENCES: sizes and form.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.arange(0, NP)
    dtype = COEFFICIENTS.dtype.element_ty
    post_BT = post_of(COEFFICIENTS, token, s, T, N)
    lacking_BT = tl.zeros((BLOCK_T, NP), dtype)  # 1 − column sums of mix, the coefficient of X_t itself
    if DIFFERENCES:
        lacking_BT += 1
        for index in tl.static_range(N):
            lacking_BT -= mix_row(COEFFICIENTS, index, token, s, T, N)
    d_post_BT = tl.zeros((BLOCK_T, NP), dtype)
    d_mix_BST = tl.zeros((BLOCK_T, NP, NP), dtype)
    # one program has all channels of its tokens: sums over channels in a fixed order, without a second pass
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (token < T)[:, None] & (c < C)[None, :]
        x_BSC, g_BTC = tile_of(X, token, c, s, T, C, N, dtype), tile_of(G, token, c, s, T, C, N, dtype)
        f_BC = tl.load(ADDED + token[:, None] * C + c[None, :], live, other=0.0).to(dtype)
        d_f_BC = tl.sum(post_BT[:, :, None] * g_BTC, 1)
        tl.store(DADDED + token[:, None] * C + c[None, :], d_f_BC.to(DADDED.dtype.element_ty), live)
        d_post_BT += tl.sum(g_BTC * f_BC[:, None, :], 2)
        d_x_BSC = lacking_BT[:, :, None] * g_BTC
        for index in tl.static_range(N):
            g_BC, x_BC = row_of(g_BTC, s, index), row_of(x_BSC, s, index)
            d_x_BSC += mix_column(COEFFICIENTS, index, token, s, T, N)[:, :, None] * g_BC[:, None, :]
            part_BTC = x_BC[:, None, :] - x_BSC if DIFFERENCES else x_BC[:, None, :]
            d_row_BT = tl.sum(g_BTC * part_BTC, 2)
            d_mix_BST += tl.where((s == index)[None, :, None], d_row_BT[:, None, :], 0.0)
        store_tile(DX, d_x_BSC, token, c, s, T, C, N)
    base, live = token * (N * (N + 2)), token < T
    s_ok = live[:, None] & (s < N)[None, :]
    tl.store(DCOEFFICIENTS + base[:, None] + s[None, :] * (N + 2), tl.zeros((BLOCK_T, NP), dtype), s_ok)
    tl.store(DCOEFFICIENTS + base[:, None] + s[None, :] * (N + 2) + N + 1, d_post_BT, s_ok)
    entry = s[None, :, None] * (N + 2) + 1 + s[None, None, :]
    inside = live[:, None, None] & (s < N)[None, :, None] & (s < N)[None, None, :]
    tl.store(DCOEFFICIENTS + base[:, None, None] + entry, d_mix_BST, inside)
