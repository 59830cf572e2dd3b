"""A training step's forward and backward pass, recorded once and replayed without Python.

A step of a small model is some hundred operations of microseconds, each called from Python. On CUDA a graph launches
them all at once (``cuda_graphs=true``). On a CPU a `Tape` calls them one after the other, without autograd. Clipping,
optimizer and logs remain outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stability.objectives import Examples

WARM_UP = 2  # passes before the capture: kernels are compiled and libraries initialised in them
MOST_SHAPES = 4  # each has memory of its own for all activations
MOST_RECORDED = 512 << 20  # bytes of a pass on a CPU, while it is recorded
COMPARED = 2  # first replays on a CPU, compared with the computation: of the batch that was recorded, and of the next

Gradients = list[Tensor | None]
# computes sums and gradients → (both in static memory, call that computes them anew in the same memory)
Capture = Callable[[Callable[[], tuple[list[Tensor], Gradients]]], tuple[list[Tensor], Gradients, Callable[[], None]]]


class Uncaptured(RuntimeError):
    """The pass cannot be captured; the message says why."""


def require_graphs(device: torch.device) -> None:
    """Raise a ``ValueError`` if the device has no CUDA graphs."""
    if device.type != "cuda":
        raise ValueError("cuda_graphs=true needs device=cuda, and this device is a CPU; use cuda_graphs=false")


class Recorded(NamedTuple):
    """One captured pass: its inputs, results and replay."""

    examples: Examples
    sums: list[Tensor]
    gradients: Gradients
    replay: Callable[[], None]


class CapturedBackward:
    """The sums and gradients of a batch, captured once for each shape of batch and replayed afterwards.

    The replay runs the same kernels on the same memory. Each batch is therefore copied into the first batch's tensors.
    The gradients of all batches are the same tensors.

    Attributes:
        compute: adds a batch's gradient to the parameters' and returns its sums.
        parameters: the model's parameters.
        capture: records a computation; tests replace it.
    """

    def __init__(
        self,
        compute: Callable[[Examples], Sequence[Tensor]],
        parameters: Sequence[nn.Parameter],
        capture: Capture | None = None,
    ):
        self.compute, self.parameters = compute, list(parameters)
        self.capture = capture or capture_on_cuda
        self._recorded: dict[Hashable, Recorded] = {}

    def __call__(self, examples: Examples) -> list[Tensor]:
        """Set the parameters' gradients to those of a batch; return its sums.

        The sums are overwritten by the next call.

        Raises:
            Uncaptured: the batch has yet another shape, or the pass cannot be captured.
        """
        # A parameter in other memory than before, too, needs another capture.
        key = (_shapes(examples), tuple(parameter.data_ptr() for parameter in self.parameters))
        if key not in self._recorded:
            if len(self._recorded) == MOST_SHAPES:
                raise Uncaptured(f"cuda_graphs=true: batches of more than {MOST_SHAPES} shapes; use cuda_graphs=false")
            self._recorded[key] = self._record(examples)
        recorded = self._recorded[key]
        for held, given in zip(_tensors(recorded.examples), _tensors(examples), strict=True):
            held.copy_(given, non_blocking=True)
        recorded.replay()
        for parameter, gradient in zip(self.parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        return recorded.sums

    def _record(self, examples: Examples) -> Recorded:
        held = examples.each(Tensor.clone)

        def run() -> tuple[list[Tensor], Gradients]:
            # Without gradients at hand the pass stores new ones, in the graph's memory, rather than adding to old ones.
            for parameter in self.parameters:
                parameter.grad = None
            sums = list(self.compute(held))
            return sums, [parameter.grad for parameter in self.parameters]

        return Recorded(held, *self.capture(run))


def capture_on_cuda(
    run: Callable[[], tuple[list[Tensor], Gradients]],
) -> tuple[list[Tensor], Gradients, Callable[[], None]]:
    """Record a computation as a CUDA graph; see `Capture`.

    Raises:
        Uncaptured: it reads values on the host, or allocates there.
    """
    # torch's recipe: the passes before the capture run on a stream of their own
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            sums, gradients = run()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise Uncaptured(
            f"cuda_graphs=true: this model's step cannot be captured ({reason}); use cuda_graphs=false"
        ) from error
    return sums, gradients, graph.replay


def capture_on_cpu(
    run: Callable[[], tuple[list[Tensor], Gradients]],
) -> tuple[list[Tensor], Gradients, Callable[[], None]]:
    """Record a computation's operations as a `Tape`; see `Capture`.

    The first replays are compared with the computation itself, bit for bit.

    Raises:
        Uncaptured: as `Tape`, or a replay gives other bits; replays raise it, too.
    """
    from stability.curvature.tape import Refused, Tape  # short runs need none

    absent: list[bool] = []

    def run_flat(_: list[Tensor]) -> list[Tensor]:
        sums, gradients = run()
        absent[:] = [gradient is None for gradient in gradients]
        return sums + [gradient for gradient in gradients if gradient is not None]

    try:
        tape = Tape(run_flat, [], MOST_RECORDED)
    except Refused as error:
        raise Uncaptured(str(error)) from error
    # The tape's own are inference tensors, which an optimizer cannot change.
    found = [_over_same_memory(tensor) for tensor in tape.outputs]
    num_sums = len(found) - absent.count(False)
    sums, given = found[:num_sums], iter(found[num_sums:])
    gradients = [None if is_absent else next(given) for is_absent in absent]
    left_to_compare = COMPARED

    def replay() -> None:
        nonlocal left_to_compare
        if not tape.run([]):
            raise Uncaptured("the code reads other numbers than before")
        if left_to_compare:
            left_to_compare -= 1
            computed = run_flat([])
            if len(computed) != len(found) or not all(map(_have_same_bits, found, computed)):
                warnings.warn(
                    "a training step's recorded operations gave other numbers than the step itself; it is computed "
                    "directly",
                    stacklevel=2,
                )
                raise Uncaptured("a replay gave other numbers")

    return sums, gradients, replay


def _over_same_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    a_bytes, b_bytes = (each.contiguous().flatten().view(torch.uint8) for each in (a, b))  # a NaN equals itself
    return torch.equal(a_bytes, b_bytes)


def _tensors(examples: Examples) -> list[Tensor]:
    found: list[Tensor] = []
    examples.each(lambda tensor: found.append(tensor) or tensor)
    return found


def _shapes(examples: Examples) -> tuple[Any, ...]:
    """Return shape and dtype of each tensor, and which fields are absent."""
    absent = tuple(part is None for part in examples)
    return absent, tuple((tensor.shape, tensor.dtype) for tensor in _tensors(examples))
