"""Attention on a band |i − j| ≤ 64: queries, keys and values in, without projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases.case import EAGER, OURS, Call, Case, Promise, drawn, step_of
from kernels.roofline import Traffic

FLEX, FLASH = "FlexAttention", "SDPA, no mask"
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the band in bfloat16 and TF32. ``smoke``: tiny ones."""
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
        found.append(Case("band_attention", label, contestants, _traffic(shape, window, dtype), precision, promises))
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
    """Return torch's FlexAttention on the band, compiled. Errors: ``RuntimeError`` on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type == "cpu":
        raise RuntimeError("FlexAttention has no backward pass on a CPU")

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= window

    mask = create_block_mask(sees, None, None, positions, positions, device=str(device))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)  # type: ignore[return-value]


def _traffic(shape: tuple[int, int, int, int], window: int, dtype: torch.dtype) -> Callable[[], Traffic]:
    """Return what gives the bytes and operations of both passes."""

    def both() -> Traffic:
        from kernels.band_attention import traffic

        batch, heads, positions, width = shape
        sizes = {"batch": batch, "heads": heads, "positions": positions, "width": width}
        phases = [
            traffic(**sizes, before=window, after=window, dtype=dtype, phase=phase) for phase in ("forward", "backward")
        ]
        return phases[0] + phases[1]

    return both
