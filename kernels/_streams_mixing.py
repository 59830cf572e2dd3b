# Triton compiles this code: values may replace a tl.constexpr, and kernels accept num_warps and other options.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
"""Compute gates and mixing matrices of several streams inside kernels.

Values, exact gradients and derivatives along a line. Axes of tiles: S streams read, T streams written (both padded), B
tokens. Sinkhorn's matrices have tokens last: a thread holds whole matrices and sums over rows and columns by itself.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return a @ b for two tiles.

    Args:
        a: (I, J).
        b: (J, L).
        WIDE: float64 tiles, without tensor cores.
        PRECISION: of float32 products.
    """
    return tl.sum(a[:, :, None] * b[None, :, :], 1) if WIDE else tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def tanh(z, WIDE: tl.constexpr):
    """Return tanh z, by a polynomial for small |z| in float32."""
    small = tl.exp(-2 * tl.abs(z))
    quotient = (1 - small) / (1 + small)
    found = tl.where(z < 0, -quotient, quotient)
    if not WIDE:
        # the quotient has lost its digits at small |z|
        square = z * z
        series = z * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        found = tl.where(tl.abs(z) < 0.125, series, found)
    return found


@triton.jit
def log_sum(m, AXIS: tl.constexpr):
    """Return ln Σ exp m over an axis with a finite entry."""
    largest = tl.max(m, AXIS)
    return largest + tl.log(tl.sum(tl.exp(m - tl.expand_dims(largest, AXIS)), AXIS))


@triton.jit
def normalise(m, AXIS: tl.constexpr):
    """Return exp m over its sum along an axis with a finite entry."""
    exponentials = tl.exp(m - tl.expand_dims(tl.max(m, AXIS), AXIS))
    return exponentials / tl.expand_dims(tl.sum(exponentials, AXIS), AXIS)


@triton.jit
def pad_matrices(m_STB, s, t, N: tl.constexpr):
    """Return N-stream matrices in the corner of padded ones, without interaction.

    0 on the rest of the diagonal, −∞ elsewhere.

    Args:
        m_STB: the padded matrices.
        s: streams read.
        t: streams written.
        N: number of streams.
    """
    inside, outside = (s < N) & (t < N), (s >= N) & (t >= N)
    return tl.where(inside, m_STB, tl.where(outside, 0.0, float("-inf")))


@triton.jit
def sinkhorn(m_STB, K: tl.constexpr, NP: tl.constexpr, B: tl.constexpr):
    """Return exp(m − f − g) after K iterations, columns then rows.

    An iteration is g = ln Σ_s exp(m − f), f = ln Σ_t exp(m − g), from f = 0.

    Args:
        m_STB: logits.
        K: iterations.
        NP: padded streams.
        B: tokens.
    """
    f_SB = tl.zeros((NP, B), m_STB.dtype)
    for _ in range(K - 1):
        g_TB = log_sum(m_STB - f_SB[:, None, :], 0)
        f_SB = log_sum(m_STB - g_TB[None, :, :], 1)
    g_TB = log_sum(m_STB - f_SB[:, None, :], 0)
    return normalise(m_STB - g_TB[None, :, :], 1)


@triton.jit
def sinkhorn_backward(m_STB, adjoint_STB, HISTORY, K: tl.constexpr, NP: tl.constexpr, B: tl.constexpr):
    """Return the exact gradient by m of ⟨adjoint, sinkhorn(m)⟩.

    The 2K steps are reversed one by one. A step is a log-softmax: h ← h − p·Σh, with p its result.

    Args:
        m_STB: logits.
        adjoint_STB: the result's gradient.
        HISTORY: this program's memory for f and g of each iteration, (2K, NP, B).
        K: iterations.
        NP: padded streams.
        B: tokens.
    """
    place = tl.arange(0, NP)[:, None] * B + tl.arange(0, B)[None, :]
    f_SB = tl.zeros((NP, B), m_STB.dtype)
    g_TB = tl.zeros((NP, B), m_STB.dtype)
    for k in range(K):
        g_TB = log_sum(m_STB - f_SB[:, None, :], 0)
        tl.store(HISTORY + 2 * k * NP * B + place, f_SB)
        tl.store(HISTORY + (2 * k + 1) * NP * B + place, g_TB)
        f_SB = log_sum(m_STB - g_TB[None, :, :], 1)
    tl.debug_barrier()  # another thread may read the numbers
    h_STB = adjoint_STB * normalise(m_STB - g_TB[None, :, :], 1)
    for step in range(K):
        k = K - 1 - step
        g_TB = tl.load(HISTORY + (2 * k + 1) * NP * B + place)
        rows_STB = normalise(m_STB - g_TB[None, :, :], 1)
        h_STB -= rows_STB * tl.sum(h_STB, 1)[:, None, :]
        f_SB = tl.load(HISTORY + 2 * k * NP * B + place)
        columns_STB = normalise(m_STB - f_SB[:, None, :], 0)
        h_STB -= columns_STB * tl.sum(h_STB, 0)[None, :, :]
    return h_STB


@triton.jit
def sinkhorn_taylor(m_STB, m1_STB, m2_STB, K: tl.constexpr, NP: tl.constexpr, B: tl.constexpr):
    """Return sinkhorn(m) and two derivatives along a line.

    A step y = m − ln Σ exp m has y′ = m′ − ⟨p, m′⟩ and y″ = m″ − ⟨p, m″ + y′²⟩.

    Args:
        m_STB, m1_STB, m2_STB: logits and two derivatives.
        K: iterations.
        NP: padded streams.
        B: tokens.
    """
    f_SB = tl.zeros((NP, B), m_STB.dtype)
    p_STB = m_STB
    for _ in range(K):
        g_TB = log_sum(m_STB - f_SB[:, None, :], 0)
        p_STB = normalise(m_STB - f_SB[:, None, :], 0)
        m1_STB -= tl.sum(p_STB * m1_STB, 0)[None, :, :]
        m2_STB -= tl.sum(p_STB * (m2_STB + m1_STB * m1_STB), 0)[None, :, :]
        f_SB = log_sum(m_STB - g_TB[None, :, :], 1)
        p_STB = normalise(m_STB - g_TB[None, :, :], 1)
        m1_STB -= tl.sum(p_STB * m1_STB, 1)[:, None, :]
        m2_STB -= tl.sum(p_STB * (m2_STB + m1_STB * m1_STB), 1)[:, None, :]
    return p_STB, p_STB * m1_STB, p_STB * (m2_STB + m1_STB * m1_STB)


@triton.jit
def softmax_taylor(z, z1, z2):
    """Return softmax z and two derivatives along a line, (B, R).

    Over the last axis: p′ = p∘c and p″ = p∘(q − ⟨p, q⟩), c = z′ − ⟨p, z′⟩, q = z″ + c².

    Args:
        z: logits.
        z1: z′, 0 if z is −∞.
        z2: z″, 0 if z is −∞.
    """
    p = normalise(z, 1)
    c = z1 - tl.sum(p * z1, 1)[:, None]
    q = z2 + c * c
    return p, p * c, p * (q - tl.sum(p * q, 1)[:, None])


@triton.jit
def sigmoid_taylor(z, z1, z2):
    """Return σ(z) and two derivatives along a line.

    Args:
        z: z.
        z1: z′.
        z2: z″.
    """
    g = tl.sigmoid(z)
    slope = g * (1 - g)
    return g, slope * z1, slope * (z2 + (1 - 2 * g) * z1 * z1)


@triton.jit
def tanh_taylor(z, z1, z2, WIDE: tl.constexpr):
    """Return tanh z and two derivatives along a line.

    Args:
        z: z.
        z1: z′.
        z2: z″.
        WIDE: as in `product`.
    """
    h = tanh(z, WIDE)
    slope = 1 - h * h
    return h, slope * z1, slope * (z2 - 2 * h * z1 * z1)


@triton.jit
def root_taylor(p, p1, p2, s, s1, s2):
    """Return p/√s and two derivatives along a line.

    Args:
        p, p1, p2: (B, O).
        s, s1, s2: (B,).
    """
    r = 1 / tl.sqrt(s)
    r1 = -0.5 * r * r * r * s1
    r2 = 0.75 * r * r * r * r * r * s1 * s1 - 0.5 * r * r * r * s2
    return (
        r[:, None] * p,
        r1[:, None] * p + r[:, None] * p1,
        r2[:, None] * p + 2 * r1[:, None] * p1 + r[:, None] * p2,
    )
