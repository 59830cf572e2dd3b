"""Load, store, mask and multiply tiles of a band; choose a launch's sizes.

A sequence of N positions begins with G global keys, visible to every query. The M = N − G later positions have the
queries and their own numbering n = 0 … M − 1. Dilation d splits them into d classes by remainder: place a in class r is
n = r + d·a, and a window counts places within a class.

Constants: SCALE of the scores; BEFORE and AFTER, the window; DILATION d; GLOBAL G; MASKED, with a mask; OWN, positions
see themselves even if invalid; ROWS and OTHERS as in `Tiling`; WIDTH, padded features; PRECISION of products; ACC, the
sums' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels._rounding import INTERPRETED, round_to


@dataclass(frozen=True)
class Tiling:
    """A launch's sizes.

    ``rows``: places of a class per program. ``others``: places of the other side per tile (keys for a block of queries,
    queries for a block of keys). ``width``: features, a power of two.
    """

    rows: int
    others: int
    width: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiling(window: int, width: int, dtype: torch.dtype, num_parts: int = 1) -> Tiling:
    """Return sizes with tiles fitting into a thread's registers (compiled for sm_90).

    Args:
        window: positions per window.
        width: head width.
        dtype: of q, k and v.
        num_parts: 1, or 3 for q, k and v with two derivatives.
    """
    # a block of R rows needs R + window − 1 keys: small blocks for narrow bands; large ones for wide bands read keys
    # less often (except for float64 and three parts)
    padded = max(16, triton.next_power_of_2(width))
    is_narrow, is_large = dtype == torch.bfloat16, dtype == torch.float64 or num_parts > 1
    if window <= 16:
        num_warps = 1 if padded <= 32 else 2 if padded <= 64 else 4 if is_narrow else 8
        return Tiling(16, 16, padded, min(8, num_warps * 2) if is_large else num_warps, 1)
    if is_large:
        return Tiling(32 if padded <= 64 else 16, 16, padded, 8, 1)
    is_small = window <= 64 or (padded > 64 and not is_narrow)
    return Tiling(32 if is_small else 64, 32, padded, 4 if is_narrow else 8, 2)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """Return a·b with sums in ``ACC``; a is rounded to b's dtype.

    Args:
        a: tile (I, J).
        b: tile (J, L).
        PRECISION: of float32 products.
        ACC: dtype of the sums.
    """
    a = round_to(a, b.dtype)
    if INTERPRETED:  # NumPy has no bfloat16
        a = a.to(ACC)
        b = b.to(ACC)
    if ACC == tl.float64:  # noqa: SIM300  # Triton 3.6 does not compile tl.dot in float64 at all sizes
        found = tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        found = tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)
    return found


@triton.jit
def tile_of(base, position, inside, features, width, step):
    """Load (positions, features) of one head; zeros beyond either end.

    Args:
        base: pointer to the head.
        position: (P,).
        inside: (P,), whether a position exists.
        features: (F,).
        width: head width.
        step: stride between two positions.
    """
    at = base + position.to(tl.int64)[:, None] * step + features[None, :]
    return tl.load(at, mask=inside[:, None] & (features < width)[None, :], other=0.0)


@triton.jit
def store_tile(base, position, inside, features, width, step, tile):
    """Write (positions, features) of one head, in the target's dtype.

    Args:
        base: pointer to the head.
        position: (P,).
        inside: (P,), whether a position exists.
        features: (F,).
        width: head width.
        step: stride between two positions.
        tile: (P, F).
    """
    at = base + position.to(tl.int64)[:, None] * step + features[None, :]
    tl.store(at, round_to(tile, base.dtype.element_ty), mask=inside[:, None] & (features < width)[None, :])


@triton.jit
def program_of(num_queries, heads, ROWS: tl.constexpr, DILATION: tl.constexpr):
    """Return this program's first place, class, sequence and head, and the blocks per class.

    Args:
        num_queries: M.
        heads: H.
        ROWS: places per block.
        DILATION: d.
    """
    blocks = tl.cdiv(tl.cdiv(num_queries, DILATION), ROWS)
    program = tl.program_id(0)
    of_class = program // blocks
    of_head = (of_class // DILATION).to(tl.int64)
    return (program % blocks) * ROWS, of_class % DILATION, of_head // heads, of_head % heads, blocks


@triton.jit
def places(first, residue, limit, num_queries, COUNT: tl.constexpr, DILATION: tl.constexpr):
    """Return ``COUNT`` places, their positions n, and whether they are valid.

    Args:
        first: first place.
        residue: the class r.
        limit: valid places are existing and below this limit.
        num_queries: M.
        COUNT: number of places.
        DILATION: d.
    """
    place = first + tl.arange(0, COUNT)
    n = residue + place * DILATION
    return place, n, (place >= 0) & (n < num_queries) & (place < limit)


@triton.jit
def num_tiles(
    ROWS: tl.constexpr, OTHERS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, GLOBAL: tl.constexpr
):
    """Return the number of key tiles for a block of queries: global keys, then windows.

    Args:
        ROWS: queries per block.
        OTHERS: keys per tile.
        BEFORE: window before.
        AFTER: window after.
        GLOBAL: number of global keys.
    """
    return tl.cdiv(GLOBAL, OTHERS) + tl.cdiv(ROWS + BEFORE + AFTER, OTHERS)


@triton.jit
def keys_of(
    tile, row, is_row, first, residue, present, num_queries,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Return a key tile's positions, their existence (OTHERS,), and visible pairs (ROWS, OTHERS).

    Args:
        tile: its number.
        row: the queries' places, (ROWS,).
        is_row: whether they exist.
        first: the block's first place.
        residue: the class r.
        present: mask of the sequence.
        num_queries: M.
        BEFORE … OTHERS: constants as in the module.
    """
    last_global: tl.constexpr = (GLOBAL + OTHERS - 1) // OTHERS * OTHERS
    number = tile * OTHERS + tl.arange(0, OTHERS)
    key, m, inside = places(
        first - BEFORE + tile * OTHERS - last_global, residue, first + ROWS + AFTER, num_queries, OTHERS, DILATION
    )
    position = m + GLOBAL
    seen = sees(row[:, None], key[None, :], BEFORE, AFTER)
    if GLOBAL > 0:  # window keys begin after these tiles, so no global key is in a window by its number
        is_global = number < last_global
        position = tl.where(is_global, number, position)
        inside = (is_global & (number < GLOBAL)) | ((number >= last_global) & inside)
        seen = seen | is_global[None, :]
    there = valid(present, position, inside, MASKED)[None, :]
    if OWN:
        there = there | (inside[None, :] & (key[None, :] == row[:, None]))
    return position, inside, seen & there & is_row[:, None]


@triton.jit
def sees(query, key, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Return the pairs of query and key within the window.

    Args:
        query: places (Q, 1) or (1, Q).
        key: places (1, J) or (J, 1).
        BEFORE: window before.
        AFTER: window after.
    """
    return (key - query >= -BEFORE) & (key - query <= AFTER)


@triton.jit
def valid(present, position, inside, MASKED: tl.constexpr):
    """Return whether keys are inside and not padding.

    Args:
        present: mask of the sequence.
        position: (J,).
        inside: (J,).
        MASKED: whether there is a mask.
    """
    if MASKED:
        inside = inside & (tl.load(present + position, mask=inside, other=0) != 0)
    return inside
