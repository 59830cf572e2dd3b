"""Cross entropy over a large vocabulary, from the head's inputs and its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Call, Case, Promise, drawn, step_of
from kernels.roofline import Traffic

CHUNKED, LIGER = "eager, chunks", "Liger"
CHUNKS = 16
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the loss in bfloat16. ``smoke``: tiny ones."""
    rows, columns, width = (32, 80, 32) if smoke else (8192, 50_304, 768)
    sizes = (rows, columns, width)
    contestants = {
        OURS: _maker(sizes, _ours),
        EAGER: _maker(sizes, lambda: _whole),
        COMPILED: _maker(sizes, lambda: torch.compile(_whole, fullgraph=True, dynamic=False)),
        CHUNKED: _maker(sizes, lambda: _in_chunks),
        LIGER: _maker(sizes, _liger),
    }
    promises = (Promise(OURS, EAGER, 0.35, quantity="memory"), Promise(OURS, EAGER, 1.1))
    label = f"cross entropy R={rows:,} V={columns:,} d={width}"
    return [Case("loss", label, contestants, _traffic(sizes), "bf16", promises)]


def _maker(sizes: tuple[int, int, int], loss: Callable[[], Loss]) -> Callable[[torch.device], Call]:
    def on(device: torch.device) -> Call:
        rows, columns, width = sizes
        hidden_RD = drawn(rows, width, device=device, dtype=torch.bfloat16)
        weight_VD = (drawn(columns, width, device=device, grad=False) / width**0.5).bfloat16().requires_grad_()
        bias_V = torch.zeros(columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        targets_R = torch.arange(rows, device=device) % columns
        run = loss()
        return step_of(lambda: run(hidden_RD, weight_VD, bias_V, targets_R), [hidden_RD, weight_VD, bias_V])

    return on


def _whole(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_R: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_RD, weight_VD, bias_V).float(), targets_R)


def _in_chunks(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_R: Tensor) -> Tensor:
    parts = zip(hidden_RD.chunk(CHUNKS), targets_R.chunk(CHUNKS), strict=True)
    losses = [
        checkpoint(_whole, hidden, weight_VD, bias_V, targets, use_reentrant=False) * len(targets)
        for hidden, targets in parts
    ]
    return torch.stack(losses).sum() / len(targets_R)  # type: ignore[arg-type]


def _ours() -> Loss:
    from kernels.loss import vocabulary_sums

    def run(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_R: Tensor) -> Tensor:
        of_all, of_target = vocabulary_sums(hidden_RD, weight_VD, bias_V, targets_R)
        return (of_all - of_target).mean()

    return run


def _liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden_RD, weight_VD, bias_V, targets_R: loss(weight_VD, hidden_RD, targets_R, bias_V)


def _traffic(sizes: tuple[int, int, int]) -> Callable[[], Traffic]:
    def both() -> Traffic:
        from kernels.loss import least_traffic

        return least_traffic(*sizes, of="forward") + least_traffic(*sizes, of="backward")

    return both
