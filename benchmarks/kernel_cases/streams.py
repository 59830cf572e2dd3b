"""A residual connection of four streams around an empty branch: reading, mixing and joining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Call, Case, Promise, ceil_div, drawn, step_of
from kernels.roofline import Traffic
from stability.residuals import build

if TYPE_CHECKING:
    from kernels.streams import Shape

LITE = "mhc_lite, ours"
# operations an entry in half an iteration of Sinkhorn and Knopp: difference, maximum, exponential, sum
OF_A_STEP = 4


def cases(smoke: bool) -> list[Case]:
    """Return the cases: one connection of mHC, beside mHC-lite's; tiny ones if ``smoke``."""
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
    sizes = {"tokens": batch * positions, "streams": 4, "width": width, "options": 16, "itemsize": 2}
    return [Case("streams", label, contestants, partial(_both_passes, sizes), "bf16", promises)]


def _connection(
    name: str, impl: str, shape: tuple[int, int, int, int], *, compiled: bool = False
) -> Callable[[torch.device], Call]:
    """Return a function that makes a connection's call on a device.

    The call computes gradients by its state and parameters.
    """

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


def _both_passes(sizes: dict[str, int]) -> Traffic:
    return traffic("forward", **sizes) + traffic("backward", **sizes)


def traffic(
    launch: str,
    *,
    tokens: int,
    streams: int,
    width: int,
    options: int = 0,
    lite: bool = False,
    iterations: int = 20,
    itemsize: int = 4,
    wide: int = 4,
    once: bool = True,
) -> Traffic:
    """Return bytes and operations of one of `LAUNCHES`, or of one of `PASSES`.

    Args:
        launch: its name.
        tokens: token count.
        streams: stream count N.
        width: features per stream.
        options: the mixing's logits: N² (mhc), permutations (``lite``), or 0 for hyper-connections.
        lite: whether the mixing is mHC-lite's.
        iterations: Sinkhorn and Knopp's iterations.
        itemsize: bytes per number in X, u and F.
        wide: bytes per coefficient or weight.
        once: whether each buffer moves once (repeated reads hit a cache): a lower bound for a launch's time. False: all
            loads and stores.

    Raises:
        KeyError: unknown name.
    """
    from kernels.streams import Shape  # needs triton

    shape = Shape(tokens, streams, width, options, lite)
    sizes = (shape, iterations if options and not lite else 0, itemsize, wide, once)
    return sum((LAUNCHES[name](*sizes) for name in PASSES.get(launch, (launch,))), Traffic(0, 0, 0))


def _coefficients(shape: Shape) -> int:
    return shape.tokens * shape.streams * (shape.streams + 2)


def _state(shape: Shape) -> int:
    """Return the count of numbers in X."""
    return shape.tokens * shape.streams * shape.width


def _logits(shape: Shape) -> int:
    return shape.tokens * shape.outputs * (1 if shape.options else shape.streams)


def _norms(shape: Shape) -> int:
    return shape.tokens * (1 if shape.options else shape.streams)


def _weights(shape: Shape) -> int:
    return shape.outputs * shape.width * (shape.streams if shape.options else 1)


def _constants(shape: Shape) -> int:
    """Return the count of numbers a reading program needs beside the weights.

    Biases and permutation matrices, or static coefficients and amplitudes.
    """
    if not shape.options:
        return (shape.streams + 1) * shape.outputs
    return shape.outputs + (shape.options * shape.streams**2 if shape.lite else 0)


def _sinkhorn_steps(shape: Shape, iterations: int) -> int:
    return 2 * iterations * OF_A_STEP * shape.tokens * shape.streams**2


def _read(shape: Shape, iterations: int, itemsize: int, wide: int, once: bool, *, order: int = 0) -> Traffic:
    """Count the forward pass; ``order`` 2: with two derivatives along a line, without writing logits and norms."""
    num_parts, programs = 1 + order, 1 if once else shape.read_programs
    read = itemsize * _state(shape) * (1 if once else 2) + wide * programs * _weights(shape)
    if shape.options:
        permutations = shape.options * shape.streams**2 if shape.lite else 0
        constants = programs * shape.outputs
    else:
        permutations, static = 0, shape.streams * shape.outputs
        # the static coefficients are loaded with each token
        constants = programs * shape.outputs + (static if once else shape.tokens * static)
    written = itemsize * shape.tokens * shape.width + wide * _coefficients(shape)
    kept = 0 if order else wide * (_logits(shape) + _norms(shape))
    products = {0: 1, 2: 6}[order] * _state(shape) * shape.outputs
    return Traffic(
        num_parts * (read + wide * constants) + wide * programs * permutations,
        num_parts * written + kept,
        2 * products + {0: 4, 2: 18}[order] * _state(shape) + {0: 1, 2: 3}[order] * _sinkhorn_steps(shape, iterations),
    )


def _logits_backward(shape: Shape, iterations: int, itemsize: int, wide: int, once: bool) -> Traffic:
    """Count the gradient by the logits; Sinkhorn's saved steps are written and read again, through a cache."""
    programs = 1 if once else shape.read_programs
    read = itemsize * (_state(shape) + shape.tokens * shape.width) + wide * (_coefficients(shape) + _logits(shape))
    written = wide * (_logits(shape) + _norms(shape))
    if shape.options:
        constants = programs * _constants(shape)
        gates = 2 * shape.streams * shape.tokens
        kept = 0 if once else shape.read_programs * 2 * iterations * shape.padded_streams * shape.block_tokens
    else:
        constants, gates, kept = programs * shape.outputs, 0, 0
        written += wide * _coefficients(shape)
    return Traffic(
        read + wide * (constants + gates + kept),
        written + wide * kept,
        2 * _state(shape) + 3 * _sinkhorn_steps(shape, iterations),
    )


def _read_backward(shape: Shape, iterations: int, itemsize: int, wide: int, once: bool) -> Traffic:
    """Count the gradients by X and by the weights, written in parts; adding the parts is not counted."""
    columns = 1 if once else shape.column_programs
    # in hyper-connections each stream's programs read their own rows, and all read the same weights
    per_stream = not shape.options and not once
    rows = columns // shape.streams if per_stream else columns
    weights = shape.parts * _weights(shape) * (shape.streams if per_stream else 1)
    small = rows * (_logits(shape) + 2 * _norms(shape)) + shape.tokens * (shape.streams if once else columns)
    added = shape.tokens * shape.width * (1 if once else shape.streams)
    partial_sums = shape.parts * shape.streams * shape.width * shape.outputs
    return Traffic(
        itemsize * (2 * _state(shape) + added) + wide * ((_weights(shape) if once else weights) + small),
        itemsize * _state(shape) + wide * partial_sums,
        4 * _state(shape) * shape.outputs + 6 * _state(shape),
    )


def _join(shape: Shape, iterations: int, itemsize: int, wide: int, once: bool, *, order: int = 0) -> Traffic:
    blocks = 1 if once else ceil_div(shape.width, shape.join_width)
    coefficients = blocks * shape.tokens * shape.streams * (shape.streams + 1)
    read = itemsize * (_state(shape) + shape.tokens * shape.width) + wide * coefficients
    num_parts, products = 1 + order, {0: 1, 2: 6}[order]
    flops = products * _state(shape) * (3 * shape.streams + 2)
    return Traffic(num_parts * read, num_parts * itemsize * _state(shape), flops)


def _join_backward(
    shape: Shape, iterations: int, itemsize: int, wide: int, once: bool, *, by_differences: bool = True
) -> Traffic:
    blocks = 1 if once else ceil_div(shape.width, shape.join_width)
    mixes = shape.tokens * shape.streams**2 * (blocks + (by_differences and not once))
    read = itemsize * (2 * _state(shape) + shape.tokens * shape.width)
    written = itemsize * (_state(shape) + shape.tokens * shape.width) + wide * _coefficients(shape)
    flops = _state(shape) * (5 * shape.streams + 5)
    return Traffic(read + wide * (mixes + shape.tokens * shape.streams), written, flops)


LAUNCHES: dict[str, Callable[[Shape, int, int, int, bool], Traffic]] = {
    "read": _read,
    "read_taylor": partial(_read, order=2),
    "logits_backward": _logits_backward,
    "read_backward": _read_backward,
    "join": _join,
    "join_taylor": partial(_join, order=2),
    "join_backward": _join_backward,
    "join_backward_plain": partial(_join_backward, by_differences=False),
}
# launches of a connection's passes, without its branch
PASSES = {
    "forward": ("read", "join"),
    "backward": ("join_backward", "logits_backward", "read_backward"),
    "taylor": ("read_taylor", "join_taylor"),
}
