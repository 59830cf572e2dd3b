"""Cross entropy over a large vocabulary, from the head's inputs and its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Call, Case, Promise, ceil_div, drawn, step_of
from kernels.roofline import Traffic

if TYPE_CHECKING:
    from kernels.loss import Blocks

CHUNKED, LIGER = "eager, chunks", "Liger"
CHUNKS = 16
INDEX = 8  # bytes of a target
Pass = Literal["forward", "backward", "second_order"]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the loss in bfloat16; tiny ones if ``smoke``."""
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
    return [Case("loss", label, contestants, partial(_both_passes, sizes), "bf16", promises)]


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


def _both_passes(sizes: tuple[int, int, int]) -> Traffic:
    return least_traffic(*sizes, of="forward") + least_traffic(*sizes, of="backward")


def traffic(
    rows: int,
    columns: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    of: Pass = "forward",
    bias: bool = True,
    left_out: bool = False,
    precision: str = "ieee",
    blocks: Blocks | None = None,
) -> Traffic:
    """Return one pass's loads and stores, and its matrix products' operations.

    Loads are those requested by programs; a GPU serves most from its cache. `least_traffic` counts the necessary reads
    from memory.

    Args:
        rows: hidden states.
        columns: vocabulary size.
        width: features per hidden state.
        dtype: the hidden states' and weights' type.
        of: the pass: "backward" to hidden states, weights and biases; "second_order" with both derivatives by hidden
            states, the first by weights and biases.
        bias: whether the head has biases.
        left_out: whether one column a row is left out.
        precision: the products' precision, as in the launches.
        blocks: block sizes; the launches' own if None.
    """
    from kernels.loss import blocks_of, product_blocks_of, ranges_of, second_blocks_of, wide  # needs triton

    if of == "backward":
        multiplied = blocks or product_blocks_of(dtype, precision)
        return _backward(rows, columns, width, dtype, bias, left_out, blocks or blocks_of(dtype, precision), multiplied)
    is_second = of == "second_order"
    chosen = blocks or (second_blocks_of if is_second else blocks_of)(dtype, precision)
    row_blocks, column_blocks = ceil_div(rows, chosen.rows), ceil_div(columns, chosen.columns)
    ranges, _ = ranges_of(rows, columns, chosen)
    of_hidden, of_head, products = (3, 2, 5) if is_second else (1, 1, 1)
    planes = (10 if left_out else 7) if is_second else (3 if left_out else 2)
    factors = of_hidden * rows * column_blocks * width + of_head * row_blocks * columns * (width + bias)
    return Traffic(
        read=factors * dtype.itemsize + ranges * rows * INDEX * (1 + left_out),
        written=planes * ranges * rows * wide(dtype).itemsize,
        flops=2 * products * rows * columns * width,
    )


def _backward(
    rows: int,
    columns: int,
    width: int,
    dtype: torch.dtype,
    bias: bool,
    left_out: bool,
    blocks: Blocks,
    multiplied: Blocks,
) -> Traffic:
    """Return a backward pass's loads, stores and multiplications, strip by strip of the vocabulary."""
    from kernels.loss import strip_of, wide

    size, broad = dtype.itemsize, wide(dtype).itemsize
    row_blocks, feature_blocks = ceil_div(rows, blocks.rows), ceil_div(width, multiplied.columns)
    strip_columns = strip_of(rows, columns, size, blocks)
    total = Traffic(0, 0, 0)
    for first in range(0, columns, strip_columns):
        strip = min(strip_columns, columns - first)
        of_each_row = (3 + left_out) * broad + (1 + left_out) * INDEX
        logits = Traffic(
            read=ceil_div(strip, blocks.columns) * rows * (width * size + of_each_row)
            + row_blocks * strip * (width + bias) * size,
            written=rows * strip * size,
            flops=2 * rows * strip * width,
        )
        hidden = Traffic(
            read=(feature_blocks * rows * strip + ceil_div(rows, multiplied.rows) * strip * width) * size
            + (0 if first == 0 else rows * width * broad),
            written=rows * width * broad,
            flops=2 * rows * strip * width,
        )
        weight = Traffic(0, 0, 2 * rows * strip * width)  # torch's product: its loads and stores are not known
        total += logits + hidden + weight
    return total


def least_traffic(
    rows: int,
    columns: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    of: Pass = "forward",
    left_out: bool = False,
) -> Traffic:
    """Return the same pass with each number read from or written to memory once.

    These are hidden states and the head; backward also their gradients and, written once and read once, the logits'.

    Args:
        rows: hidden states.
        columns: vocabulary size.
        width: features per hidden state.
        dtype: the hidden states' and weights' type.
        of: the pass.
        left_out: whether one column a row is left out.
    """
    counted = traffic(rows, columns, width, dtype=dtype, of=of, left_out=left_out)
    matrices = (rows + columns) * width * dtype.itemsize
    if of == "backward":
        of_logits = rows * columns * dtype.itemsize
        return Traffic(matrices + of_logits, matrices + of_logits, counted.flops)
    along_a_line = (3 * rows + 2 * columns) * width * dtype.itemsize
    return Traffic(along_a_line if of == "second_order" else matrices, counted.written, counted.flops)
