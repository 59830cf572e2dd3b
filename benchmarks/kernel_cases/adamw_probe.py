"""A step of AdamW on 124 M parameters, with ⟨g, u⟩, ‖u‖, ‖g‖."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import EAGER, OURS, Call, Case, ceil_div, drawn
from kernels.roofline import Traffic

FUSED = "torch, fused"
FLOPS = 32  # per entry, including five sums of products; root and quotient count as one each


def cases(smoke: bool) -> list[Case]:
    """Return the cases: a step of torch's, and the sums; tiny ones if ``smoke``."""
    shapes = [(32, 32), (32,)] if smoke else [(50_304, 768), *12 * [(768, 9216), (9216,)]]
    num = sum(torch.Size(shape).numel() for shape in shapes)
    contestants = {
        OURS: _ours(shapes),
        EAGER: _maker(shapes, fused=False),
        FUSED: _maker(shapes, fused=True),
    }
    counted = partial(traffic, lengths=[torch.Size(shape).numel() for shape in shapes])
    return [Case("adamw_probe", f"{num:,} parameters", contestants, counted)]


def traffic(*, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Traffic:
    """Return the launch's loads, stores and operations for tensors of these lengths.

    Four numbers an entry in, three out, and a few per program.
    """
    from kernels.adamw_probe import BLOCK, NUM_SUMS  # needs triton

    entries, programs = sum(lengths), sum(ceil_div(length, BLOCK) for length in lengths)
    own = (2 + 5 + 2 + 5) * 8  # its block, its row of the table, its rates, the scalars
    read, written = 4 * dtype.itemsize * entries + own * programs, 3 * dtype.itemsize * entries
    return Traffic(read, written + max(4, dtype.itemsize) * NUM_SUMS * programs, FLOPS * entries)


def _ours(shapes: list[tuple[int, ...]]) -> Callable[[torch.device], Call]:
    """Return a function that makes our call on a device: a step with its sums."""

    def on(device: torch.device) -> Call:
        from kernels.adamw_probe import adamw_probe

        params, gradients = ([drawn(*shape, device=device, grad=False) for shape in shapes] for _ in range(2))
        means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
        steps = [torch.ones((), device=device) for _ in params]
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "epsilon": 1e-8, "weight_decay": 1e-2}
        return lambda: adamw_probe(params, gradients, means, squares, steps, **options)

    return on


def _maker(shapes: list[tuple[int, ...]], *, fused: bool) -> Callable[[torch.device], Call]:
    """Return a function that makes torch's call on a device: a step, three sums."""

    def on(device: torch.device) -> Call:
        """Return the call on this device; each call moves the same parameters further."""
        params = [drawn(*shape, device=device) for shape in shapes]
        for param in params:
            param.grad = drawn(*param.shape, device=device, grad=False)
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=fused)

        def step() -> list[Tensor]:
            """Take a step and return ⟨g, u⟩, ‖u‖² and ‖g‖²."""
            before = [param.detach().clone() for param in params]
            optimizer.step()
            sums = [torch.zeros((), device=device) for _ in range(3)]
            for param, old in zip(params, before, strict=True):
                moved, gradient = (param.detach() - old).flatten(), param.grad
                assert gradient is not None
                for total, part in zip(
                    sums, (gradient.flatten().dot(moved), moved.dot(moved), gradient.square().sum()), strict=True
                ):
                    total += part
            return sums

        return step

    return on
