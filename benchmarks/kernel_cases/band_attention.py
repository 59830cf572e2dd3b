"""Attention on a band |i − j| ≤ 64: queries, keys and values in, without projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases.case import EAGER, OURS, Call, Case, Promise, ceil_div, drawn, step_of
from kernels.roofline import Traffic

if TYPE_CHECKING:
    from kernels.band_attention import Tiling

FLEX, FLASH = "FlexAttention", "SDPA, no mask"
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the band in bfloat16 and TF32; tiny ones if ``smoke``."""
    batch, heads, positions, width, window = (1, 1, 32, 16, 3) if smoke else (4, 12, 4096, 64, 64)
    shape = (batch, heads, positions, width)
    found = []
    for precision, dtype in DTYPES.items():
        contestants = {
            OURS: _maker(shape, dtype, lambda device: _ours(window)),
            EAGER: _maker(shape, dtype, lambda device: _masked(positions, window, device)),
            FLEX: _maker(shape, dtype, lambda device: _flex(positions, window, device)),
            FLASH: _maker(shape, dtype, lambda device: F.scaled_dot_product_attention),
        }
        promises = (Promise(OURS, EAGER, 5, is_gain=True), Promise(OURS, FLEX, 2, is_gain=True))
        label = f"B={batch} H={heads} N={positions:,} K={width} w={window}"
        sizes = {"batch": batch, "heads": heads, "positions": positions, "width": width, "dtype": dtype}
        counted = partial(_both_passes, **sizes, before=window, after=window)
        found.append(Case("band_attention", label, contestants, counted, precision, promises))
    return found


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _maker(
    shape: tuple[int, ...], dtype: torch.dtype, attention: Callable[[torch.device], Attention]
) -> Callable[[torch.device], Call]:
    def on(device: torch.device) -> Call:
        leaves, run = [drawn(*shape, device=device, dtype=dtype) for _ in range(3)], attention(device)
        return step_of(lambda: run(*leaves), leaves)

    return on


def _ours(window: int) -> Attention:
    from kernels.band_attention import band_attention

    return lambda q, k, v: band_attention(q, k, v, before=window, after=window)


def _masked(positions: int, window: int, device: torch.device) -> Attention:
    place_N = torch.arange(positions, device=device)
    mask_NN = (place_N[:, None] - place_N).abs() <= window
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NN)


def _flex(positions: int, window: int, device: torch.device) -> Attention:
    """Return torch's FlexAttention on the band, compiled; RuntimeError on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type == "cpu":
        raise RuntimeError("FlexAttention has no backward pass on a CPU")

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= window

    mask = create_block_mask(sees, None, None, positions, positions, device=str(device))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)  # type: ignore[return-value]


def _both_passes(**sizes: Any) -> Traffic:
    return traffic(**sizes, phase="forward") + traffic(**sizes, phase="backward")


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
    """Return the loads, stores and multiplications of a phase's launches.

    Every load counts: a key read by two blocks counts twice, though the second load often hits a cache. Operations are
    those in whole tiles' products, including masked pairs and padded features. The blocks' shares in the global keys'
    gradients are summed by torch; this sum is left out.

    Args:
        batch: sequences.
        heads: attention heads.
        positions: N, including the global keys.
        width: features per head.
        before: keys before a query in its band.
        after: keys after a query in its band.
        dilation: distance between neighbouring keys in a band.
        global_keys: keys read by every query.
        masked: whether a key mask is read.
        dtype: type of queries, keys and values.
        phase: "forward", "backward" or "second_order".

    Raises:
        ValueError: unknown phase.
    """
    from kernels.band_attention import tiling  # needs triton

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


def _programs(
    num_queries: int, dilation: int, before: int, after: int, sizes: Tiling
) -> Iterator[tuple[int, int, int]]:
    """Yield each block's places in one head, its queries' keys, and its keys' queries."""
    blocks = ceil_div(ceil_div(num_queries, dilation), sizes.rows)
    for residue in range(dilation):
        length = max(0, ceil_div(num_queries - residue, dilation))
        for first in range(0, blocks * sizes.rows, sizes.rows):
            end = first + sizes.rows

            def within(start: int, stop: int, length: int = length) -> int:
                return max(0, min(stop, length) - max(start, 0))

            yield within(first, end), within(first - before, end + after), within(first - after, end + before)
