"""Compute sums over a vocabulary with two derivatives along a line, without stored logits.

The sums are log-sum-exp, target logit and plain sum. L = log Σ e^z has L′ = ⟨p, z′⟩ and L″ = ⟨p, z″ + (z′ − ⟨p, z′⟩)²⟩.
The square is about the mean: two blocks are joined as Chan, Golub and LeVeque (1979) join two samples' variances,
without subtracting large numbers.
"""

import triton
import triton.language as tl

from kernels._loss_kernels import finite_or_zero, nonzero, product


@triton.jit
def line_block(
    h0,
    h1,
    h2,
    w0,
    w1,
    w2,
    rows,
    row_ok,
    columns,
    column_ok,
    D,
    hidden_stride,
    weight_stride,
    z0,
    z1,
    z2,
    H1: tl.constexpr,
    H2: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return a block of logits z and two derivatives, added to given tiles.

    z = hWᵀ, z′ = h′Wᵀ + hW′ᵀ, z″ = h″Wᵀ + 2h′W′ᵀ + hW″ᵀ. Each factor is loaded once.

    Args:
        h0, h1, h2: (R, D), hidden states and two derivatives.
        w0, w1, w2: (V, D), weights and two derivatives.
        rows, row_ok, columns, column_ok: the block, and whether its rows and columns exist.
        D, hidden_stride, weight_stride: features, and strides between rows.
        z0, z1, z2: tiles to add to.
        H1, H2, W1, W2: whether these derivatives are not zero.
        BLOCK_D, PRECISION, WIDEN: as in `logits_block`.
    """
    from_rows = rows.to(tl.int64)[:, None] * hidden_stride
    from_columns = columns.to(tl.int64)[None, :] * weight_stride
    for start in range(0, D, BLOCK_D):
        features = start + tl.arange(0, BLOCK_D)
        inside = features < D
        at_h, h_ok = from_rows + features[None, :], row_ok[:, None] & inside[None, :]
        at_w, w_ok = from_columns + features[:, None], column_ok[None, :] & inside[:, None]
        h = tl.load(h0 + at_h, mask=h_ok, other=0.0)
        w = tl.load(w0 + at_w, mask=w_ok, other=0.0)
        z0 = product(h, w, z0, PRECISION, WIDEN)
        if W1:
            v = tl.load(w1 + at_w, mask=w_ok, other=0.0)
            z1 = product(h, v, z1, PRECISION, WIDEN)
        if W2:
            z2 = product(h, tl.load(w2 + at_w, mask=w_ok, other=0.0), z2, PRECISION, WIDEN)
        if H1:
            g = tl.load(h1 + at_h, mask=h_ok, other=0.0)
            z1 = product(g, w, z1, PRECISION, WIDEN)
            if W1:
                z2 = product(g, v, product(g, v, z2, PRECISION, WIDEN), PRECISION, WIDEN)  # 2·h1 would round
        if H2:
            z2 = product(tl.load(h2 + at_h, mask=h_ok, other=0.0), w, z2, PRECISION, WIDEN)
    return z0, z1, z2


@triton.jit
def merge(scale, mean, spread, bend, part_scale, part_mean, part_spread, part_bend):
    """Return the four running numbers of two parts together.

    They are Σe, the mean of z′ under p, Σe(z′ − mean)² and Σe·z″.

    Args:
        scale, mean, spread, bend: the first part's.
        part_scale, part_mean, part_spread, part_bend: the second part's.
    """
    whole = scale + part_scale
    share = part_scale / nonzero(whole)
    gap = part_mean - mean
    return whole, mean + gap * share, spread + part_spread + gap * gap * scale * share, bend + part_bend


@triton.jit
def second_order_kernel(
    h0,  # (R, D) and its derivatives; read only with their flag
    h1,
    h2,
    w0,  # (V, D)
    w1,
    w2,
    b0,  # (V)
    b1,
    b2,
    targets,  # (R), int64
    left_out,  # (R), int64, as in `sums_kernel`
    out,  # (planes, ranges, R): log-sum-exp, mean of z′, its variance, mean of z″; z, z′, z″ at the target; their sums
    R,
    V,
    D,
    hidden_stride,
    weight_stride,
    range_columns,
    H1: tl.constexpr,
    H2: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write a vocabulary range's sums and their derivatives.

    Args:
        h0, h1, h2, w0, w1, w2, b0, b1, b2, targets, left_out, out: tensors, commented above.
        R, V, D: positions, vocabulary, width.
        hidden_stride, weight_stride: elements from a row to the next.
        range_columns: columns of a range, a multiple of ``BLOCK_V``.
        H1, H2, W1, W2, B0, B1, B2, LEFT_OUT: whether the tensor of this name is read.
        BLOCK_R, BLOCK_V, BLOCK_D: sizes of a block.
        PRECISION, WIDEN: as in `product`.
    """
    wide: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < R
    target = tl.load(targets + rows, mask=row_ok, other=-1)
    own = tl.load(left_out + rows, mask=row_ok, other=-1) if LEFT_OUT else target
    none = tl.zeros([BLOCK_R], wide)
    maximum = tl.full([BLOCK_R], float("-inf"), wide)
    scale, mean, spread, bend = none, none, none, none
    target0, target1, target2 = none, none, none
    sum0, sum1, sum2 = none, none, none
    first = tl.program_id(1) * range_columns
    for start in range(first, tl.minimum(first + range_columns, V), BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        column_ok = columns < V
        zero = tl.zeros([BLOCK_R, BLOCK_V], wide)
        z0, z1, z2 = line_block(
            h0,
            h1,
            h2,
            w0,
            w1,
            w2,
            rows,
            row_ok,
            columns,
            column_ok,
            D,
            hidden_stride,
            weight_stride,
            zero,
            zero,
            zero,
            H1,
            H2,
            W1,
            W2,
            BLOCK_D,
            PRECISION,
            WIDEN,
        )
        if B0:
            z0 += tl.load(b0 + columns, mask=column_ok, other=0.0).to(wide)[None, :]
        if B1:
            z1 += tl.load(b1 + columns, mask=column_ok, other=0.0).to(wide)[None, :]
        if B2:
            z2 += tl.load(b2 + columns, mask=column_ok, other=0.0).to(wide)[None, :]
        is_target = columns[None, :] == target[:, None]
        target0 += tl.sum(tl.where(is_target, z0, 0.0), 1)
        target1 += tl.sum(tl.where(is_target, z1, 0.0), 1)
        target2 += tl.sum(tl.where(is_target, z2, 0.0), 1)
        counts = column_ok[None, :] & (rows >= 0)[:, None]
        if LEFT_OUT:
            counts = counts & (columns[None, :] != own[:, None])
            sum0 += tl.sum(tl.where(counts, z0, 0.0), 1)
            sum1 += tl.sum(tl.where(counts, z1, 0.0), 1)
            sum2 += tl.sum(tl.where(counts, z2, 0.0), 1)
        z0 = tl.where(counts, z0, float("-inf"))
        highest = tl.maximum(maximum, tl.max(z0, 1))
        base = finite_or_zero(highest)
        e = tl.exp(z0 - base[:, None])
        part_scale = tl.sum(e, 1)
        part_mean = tl.sum(e * z1, 1) / nonzero(part_scale)
        away = z1 - part_mean[:, None]
        shrunk = tl.exp(maximum - base)
        scale, mean, spread, bend = merge(
            scale * shrunk,
            mean,
            spread * shrunk,
            bend * shrunk,
            part_scale,
            part_mean,
            tl.sum(e * away * away, 1),
            tl.sum(e * z2, 1),
        )
        maximum = highest
    place = tl.program_id(1).to(tl.int64) * R + rows
    plane = tl.num_programs(1).to(tl.int64) * R
    safe = nonzero(scale)
    tl.store(out + place, maximum + tl.log(safe), mask=row_ok)
    tl.store(out + plane + place, mean, mask=row_ok)
    tl.store(out + 2 * plane + place, spread / safe, mask=row_ok)
    tl.store(out + 3 * plane + place, bend / safe, mask=row_ok)
    tl.store(out + 4 * plane + place, target0, mask=row_ok)
    tl.store(out + 5 * plane + place, target1, mask=row_ok)
    tl.store(out + 6 * plane + place, target2, mask=row_ok)
    if LEFT_OUT:
        tl.store(out + 7 * plane + place, sum0, mask=row_ok)
        tl.store(out + 8 * plane + place, sum1, mask=row_ok)
        tl.store(out + 9 * plane + place, sum2, mask=row_ok)
