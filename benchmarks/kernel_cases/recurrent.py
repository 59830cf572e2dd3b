"""Layers of gla, deltanet and gated_deltanet: the recurrence with its projections and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Case, Promise, module_step
from kernels.roofline import Traffic
from stability.mechanisms import build

FLA = "fla"
PASSES: Any = ("forward", "backward")
# of each its settings, by which keys and values are as wide, and whether it has the delta rule and decays
LAYERS: dict[str, tuple[dict[str, Any], bool, str | None]] = {
    "gla": ({"expand_k": 1.0}, False, "features"),
    "deltanet": ({}, True, None),
    "gated_deltanet": ({"expand_v": 1}, True, "heads"),
}


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the three layers. ``smoke``: tiny ones."""
    batch, heads, positions, width = (1, 1, 32, 16) if smoke else (4, 12, 4096, 64)
    shape = (batch, positions, heads * width)
    found = []
    for name, (settings, is_delta, decay) in LAYERS.items():
        sizes = {"width": heads * width, "heads": heads, "direction": "causal", "chunk": 32, **settings}
        contestants = {
            label: _layer(name, impl, sizes, shape, compiled=label == COMPILED)
            for label, impl in ((OURS, "triton"), (EAGER, "reference"), (COMPILED, "reference"), (FLA, "fla"))
        }
        decays = {None: 0, "heads": 1, "features": width}[decay]
        of_heads = {"batch": batch, "heads": heads, "positions": positions, "keys": width, "values": width}
        # autocast hands gla's q, k and v over in bfloat16; the delta rule normalises them in float32
        input_bytes = 4 if is_delta else 2
        traffic = _traffic({**of_heads, "delta": is_delta, "decays": decays, "input_bytes": input_bytes})
        label = f"{name} B={batch} H={heads} N={positions:,} K={width}"
        found.append(Case("recurrent", label, contestants, traffic, "bf16", (Promise(OURS, FLA, 1.0),)))
    return found


def _layer(name: str, impl: str, sizes: dict[str, Any], shape: tuple[int, ...], *, compiled: bool) -> Any:
    return module_step(lambda: build(name, impl=impl, **sizes), *shape, precision="bf16", compiled=compiled)


def _traffic(sizes: dict[str, Any]) -> Callable[[], Traffic]:
    """Return what gives the bytes and operations of the recurrence's launches in both passes."""

    def both() -> Traffic:
        from kernels.recurrent import traffic

        first, second = (traffic(**sizes, part=part) for part in PASSES)
        return first + second

    return both
