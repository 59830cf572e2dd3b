"""Tiles of a band of scores: which rows and keys a program of a kernel has, which pairs see each other, products of
tiles, and the sizes that a launch takes.

A sequence of N positions begins with G global keys, which every query sees. The M = N − G positions after them have the
queries, and are counted by themselves, n = 0 … M − 1. With a dilation d they fall into d classes of equal remainder:
place a of class r is n = r + d·a, and a window counts places of one class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels._rounding import INTERPRETED, rounded


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch. ``rows``: places of a class that a program owns; ``others``: places of the other side, keys
    for a block of queries and queries for a block of keys, that a tile of scores has; ``width``: features, a power of
    two."""

    rows: int
    others: int
    width: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiling(window: int, width: int, dtype: torch.dtype, num_parts: int = 1) -> Tiling:
    """Return the sizes for windows of ``window`` positions, by which a thread's share of the tiles fits into its
    registers (compiled for sm_90).

    A block of R rows computes the scores of R + window − 1 keys, so that a narrow band takes small blocks; a wide one
    takes large ones, which read keys less often, but for float64 and where q, k and v have ``num_parts`` = 3 parts.
    """
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
    """Return a·b, added up in ``ACC``; the dtype of a's entries is rounded to that of b's."""
    a = rounded(a, b.dtype)
    if INTERPRETED:  # by NumPy, which has no bfloat16
        a = a.to(ACC)
        b = b.to(ACC)
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def tile_of(base, position, inside, features, width, step):
    """Load (positions, features) of one head; zeros beyond either end. ``step``: entries between two positions."""
    at = base + position.to(tl.int64)[:, None] * step + features[None, :]
    return tl.load(at, mask=inside[:, None] & (features < width)[None, :], other=0.0)


@triton.jit
def store_tile(base, position, inside, features, width, step, tile):
    """Write (positions, features) of one head, in the dtype of what is written into."""
    at = base + position.to(tl.int64)[:, None] * step + features[None, :]
    tl.store(at, rounded(tile, base.dtype.element_ty), mask=inside[:, None] & (features < width)[None, :])


@triton.jit
def program_of(num_queries, heads, ROWS: tl.constexpr, DILATION: tl.constexpr):
    """Return the first place of this program's block, its class, sequence and head, and how many blocks a class has."""
    blocks = tl.cdiv(tl.cdiv(num_queries, DILATION), ROWS)
    program = tl.program_id(0)
    of_class = program // blocks
    of_head = (of_class // DILATION).to(tl.int64)
    return (program % blocks) * ROWS, of_class % DILATION, of_head // heads, of_head % heads, blocks


@triton.jit
def places(first, residue, limit, num_queries, COUNT: tl.constexpr, DILATION: tl.constexpr):
    """Return ``COUNT`` places from ``first`` on, their positions n, and which of them exist and lie before
    ``limit``."""
    place = first + tl.arange(0, COUNT)
    n = residue + place * DILATION
    return place, n, (place >= 0) & (n < num_queries) & (place < limit)


@triton.jit
def num_tiles(
    ROWS: tl.constexpr, OTHERS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, GLOBAL: tl.constexpr
):
    """Return how many tiles of keys a block of queries goes through: the global keys, then those of its windows."""
    return tl.cdiv(GLOBAL, OTHERS) + tl.cdiv(ROWS + BEFORE + AFTER, OTHERS)


@triton.jit
def keys_of(
    tile, row, is_row, first, residue, present, num_queries,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DILATION: tl.constexpr, GLOBAL: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Return of a tile of keys the positions in the sequence, which of them there are, (OTHERS,), and which pairs see
    each other, (ROWS, OTHERS), for the block of queries whose places are ``row``."""
    last_global: tl.constexpr = (GLOBAL + OTHERS - 1) // OTHERS * OTHERS
    number = tile * OTHERS + tl.arange(0, OTHERS)
    key, m, inside = places(
        first - BEFORE + tile * OTHERS - last_global, residue, first + ROWS + AFTER, num_queries, OTHERS, DILATION
    )
    position = m + GLOBAL
    seen = sees(row[:, None], key[None, :], BEFORE, AFTER)
    if GLOBAL > 0:  # a window's first key is beyond these tiles, so that none of them is `near` by its number
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
    """Return which places of queries, (Q, 1) or (1, Q), see which of keys, (1, J) or (J, 1), as far as the window
    goes."""
    return (key - query >= -BEFORE) & (key - query <= AFTER)


@triton.jit
def valid(present, position, inside, MASKED: tl.constexpr):
    """Return which of the keys at ``position`` are inside and not padding."""
    if MASKED:
        inside = inside & (tl.load(present + position, mask=inside, other=0) != 0)
    return inside
