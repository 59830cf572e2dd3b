"""Count what the kernels of band attention move and compute, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels._band_tiles import Tiling, tiling
from kernels.roofline import Traffic


def traffic(
    *,
    batch: int,
    heads: int,
    positions: int,
    width: int,
    before: int,
    after: int,
    dilation: int = 1,
    global_keys: int = 0,
    masked: bool = False,
    dtype: torch.dtype = torch.float32,
    phase: str = "forward",
) -> Traffic:
    """Return what the launches of a ``phase`` ("forward", "backward", "second_order") load, store and multiply.

    ``positions``: N, the global keys among them; the rest as in `band_attention`. Counted is every load: a key that two
    blocks see counts twice, though the second load often finds it in a cache. Operations are those of the products of
    whole tiles, masked pairs and padded features among them. The sum of the blocks' shares in the global keys'
    gradients, which torch computes, is left out.
    """
    num_queries = positions - global_keys
    size, wide = dtype.itemsize, 8 if dtype == torch.float64 else 4
    sizes = tiling(before + after + 1, width, dtype, 3 if phase == "second_order" else 1)
    rows, keys, queries, programs = 0, 0, 0, 0
    for of_rows, of_keys, of_queries in _programs(num_queries, dilation, before, after, sizes):
        rows, keys, queries, programs = rows + of_rows, keys + of_keys, queries + of_queries, programs + 1
    keys += programs * global_keys
    tile = 2 * sizes.rows * sizes.others * sizes.width
    of_globals = ceil_div(global_keys, sizes.others)
    of_window = ceil_div(sizes.rows + before + after, sizes.others)
    tiles = programs * (of_globals + of_window)
    mask = int(masked)
    if phase == "forward":
        read = size * width * (rows + 2 * keys) + mask * keys
        written, flops = (size * width + wide) * rows, 2 * tile * tiles
    elif phase == "second_order":
        read = size * width * 3 * (rows + 3 * keys) + 2 * mask * keys
        written, flops = 3 * size * width * rows, 18 * tile * tiles
    elif phase == "backward":
        shared = programs * global_keys
        of_queries = size * width * (3 * rows + 2 * keys + 2 * shared) + wide * rows + mask * (keys + shared)
        of_keys = size * width * (2 * rows + 2 * queries) + 2 * wide * queries + mask * rows
        read = of_queries + of_keys
        written = (size * width + wide) * rows + 2 * wide * width * shared + 2 * size * width * rows
        flops = tile * (3 * tiles + 4 * programs * of_globals + 4 * programs * of_window)
    else:
        raise ValueError(f"phase={phase!r}; choices: forward, backward, second_order")
    return Traffic(batch * heads * read, batch * heads * written, batch * heads * flops)


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _programs(
    num_queries: int, dilation: int, before: int, after: int, sizes: Tiling
) -> Iterator[tuple[int, int, int]]:
    """Yield of each block of one head its places, the keys that its queries see, and the queries that see its keys."""
    blocks = ceil_div(ceil_div(num_queries, dilation), sizes.rows)
    for residue in range(dilation):
        length = max(0, ceil_div(num_queries - residue, dilation))
        for first in range(0, blocks * sizes.rows, sizes.rows):
            end = first + sizes.rows

            def within(start: int, stop: int, length: int = length) -> int:
                return max(0, min(stop, length) - max(start, 0))

            yield within(first, end), within(first - before, end + after), within(first - after, end + before)
