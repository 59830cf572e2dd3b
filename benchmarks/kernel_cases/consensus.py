"""Windowed self-consensus at the sizes of the consensus paper's 193 M model, as a layer: projections are part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Case, Promise, module_step
from kernels.roofline import Traffic
from stability.mechanisms import build

FLASH = "sa, SDPA"


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the layer in TF32 and bfloat16, and a longer one beside attention of the same width.
    ``smoke``: tiny ones."""
    width, heads, hidden = (32, 2, 16) if smoke else (768, 12, 256)
    short, long = (16, 24) if smoke else (1024, 8192)
    settings: dict[str, Any] = {"width": width, "heads": heads, "window": 2, "rank": 4, "edge_hidden": hidden}
    tokens = long if smoke else 8 * short
    found = []
    for precision, positions in (("tf32", short), ("bf16", short), ("bf16", long)):
        shape = (1 if smoke else tokens // positions, positions, width)
        contestants = {
            OURS: module_step(lambda: build("sc", impl="triton", **settings), *shape, precision=precision),
            EAGER: module_step(lambda: build("sc", **settings), *shape, precision=precision),
            COMPILED: module_step(lambda: build("sc", **settings), *shape, precision=precision, compiled=True),
            FLASH: module_step(
                lambda: build("sa", width=width, heads=heads, mask_diagonal=False), *shape, precision=precision
            ),
        }
        against_eager = (
            Promise(OURS, EAGER, 4, is_gain=True),
            Promise(OURS, COMPILED, 2, is_gain=True),
            Promise(OURS, EAGER, 0.2, quantity="memory"),
        )
        against_flash = (Promise(OURS, FLASH, 1.0),)
        promises = against_eager if positions == short else against_flash if precision == "bf16" else ()
        label = f"B={shape[0]} N={positions:,} d={width}"
        edges = {"window": 2, "rank": 4, "hidden": hidden}
        sizes = {"batch": shape[0], "heads": heads, "positions": positions, "head_width": width // heads, **edges}
        found.append(Case("consensus", label, contestants, _traffic(sizes), precision, promises))
    return found


def _traffic(sizes: dict[str, int]) -> Callable[[], Traffic]:
    """Return what gives the bytes and operations of the launches of both passes; the projections are left out."""

    def both() -> Traffic:
        from kernels.consensus import traffic

        launches = ("forward", "ends_backward", "network_backward")
        # float32 under autocast, too, but for an edge's target: its rotation and its bias are
        return sum((traffic(launch, **sizes, itemsize=4) for launch in launches), Traffic(0, 0, 0))

    return both
