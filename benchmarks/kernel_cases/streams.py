"""A residual connection of four streams around a branch that does nothing: what reading, mixing and joining take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Call, Case, Promise, drawn, step_of
from kernels.roofline import Traffic
from stability.residuals import build

LITE = "mhc_lite, ours"


def cases(smoke: bool) -> list[Case]:
    """Return the cases: one connection of mHC, beside mHC-lite's. ``smoke``: tiny ones."""
    batch, positions, width = (1, 8, 32) if smoke else (8, 1024, 1024)
    shape = (batch, positions, 4, width)
    contestants = {
        OURS: _connection("mhc", "triton", shape),
        EAGER: _connection("mhc", "reference", shape),
        COMPILED: _connection("mhc", "reference", shape, compiled=True),
        LITE: _connection("mhc_lite", "triton", shape),
    }
    promises = (Promise(OURS, LITE, 1.2), Promise(OURS, "bound", 0.8, is_gain=True))
    label = f"mhc B={batch} N={positions:,} S=4 d={width}"
    return [Case("streams", label, contestants, _traffic(shape), "bf16", promises)]


def _connection(
    name: str, impl: str, shape: tuple[int, int, int, int], *, compiled: bool = False
) -> Callable[[torch.device], Call]:
    """Return what makes the call of a connection, to its state and its own parameters."""

    def on(device: torch.device) -> Call:
        """Return the call on this device, in bfloat16."""
        settings: dict[str, Any] = {} if impl == "reference" else {"impl": impl}
        torch.manual_seed(0)
        module = build(name, width=shape[-1], streams=shape[2], layer=0, **settings).to(device)
        run = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
        x_BNSD = drawn(*shape, device=device, dtype=torch.bfloat16)

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return run(x_BNSD, torch.Tensor.clone)

        return step_of(forward, [x_BNSD, *module.parameters()])

    return on


def _traffic(shape: tuple[int, int, int, int]) -> Callable[[], Traffic]:
    """Return what gives the bytes and operations of the launches of both passes."""

    def both() -> Traffic:
        from kernels.streams import traffic

        batch, positions, streams, width = shape
        sizes = {"tokens": batch * positions, "streams": streams, "width": width, "options": streams**2, "itemsize": 2}
        return traffic("forward", **sizes) + traffic("backward", **sizes)

    return both
