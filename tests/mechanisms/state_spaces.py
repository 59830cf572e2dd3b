"""What the tests of `mamba` and `mamba2` share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stability.mechanisms import build
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded


def moved(name: str, **settings: Any) -> Any:
    """A causal block in float64 whose every parameter is at a place of its own."""
    layer = build_seeded(lambda: build(name, width=WIDTH, heads=HEADS, direction="causal", **settings)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(0.3 * torch.randn(value.shape, dtype=value.dtype, generator=generator))
    return layer


class CountProducts(TorchDispatchMode):
    """Counts the numbers that elementwise multiplications give, squares too."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.pow.Tensor_Scalar):
            self.num += given.numel()
        return given
