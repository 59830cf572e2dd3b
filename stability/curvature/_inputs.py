"""Checked inputs of every method: parameters, directions, losses, random states.

The loss is one mean over microbatches. Random states are replayed.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as torch_checkpoint

from stability.curvature.recorded import RecordedLoss

Tensors = dict[str, Tensor]
# elements of a dot product converted to float64 at a time: 16 MiB instead of two doubled embedding tables
_CHUNK = 1 << 20
_COMPILING = "torch._dynamo.eval_frame"  # the part of torch's compiler that runs compiled code


def check_params(params: Mapping[str, Tensor]) -> Tensors:
    """Return ``params`` as a plain dict.

    Raises:
        ValueError: an entry cannot be differentiated; one line names it with the reason.
    """
    if not isinstance(params, Mapping) or not params:
        holds = isinstance(params, (Mapping, list, tuple))
        raise ValueError(
            f"params {'holds no tensor' if holds else f'is of type {type(params).__name__}'}; give a tensor or a dict, "
            "list or tuple of tensors, nested or not, such as dict(model.named_parameters()) or "
            "list(model.parameters())"
        )
    for name, tensor in params.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"params[{name!r}] is a {type(tensor).__name__}, not a tensor")
        if not tensor.is_floating_point():
            raise ValueError(
                f"params[{name!r}] has dtype {tensor.dtype}; only floating-point tensors have a derivative"
            )
    # Plain tensors, as torch.func uses them, all have requires_grad=False; a frozen one among trainable ones is a
    # mistake.
    frozen = [name for name, tensor in params.items() if not tensor.requires_grad]
    if frozen and len(frozen) < len(params):
        raise ValueError(
            f"params[{frozen[0]!r}] has requires_grad=False; leave frozen parameters out of params and direction"
        )
    return dict(params)


def check_direction(params: Tensors, direction: Mapping[str, Tensor]) -> Tensors:
    """Return ``direction``, detached, with the keys, order, shapes and dtypes of ``params``.

    Raises:
        ValueError: the direction does not fit; one line names the entry.
    """
    if not isinstance(direction, Mapping):
        raise ValueError(
            f"direction must be a dict of name -> tensor with the keys of params, not a {type(direction).__name__}"
        )
    for names, rule in (
        ([n for n in params if n not in direction], "lacks"),
        ([n for n in direction if n not in params], "has, beyond params,"),
    ):
        if names:
            raise ValueError(
                f"direction {rule} {len(names)} of its keys, first {names[0]!r}; params and direction need the same "
                "keys"
            )
    for name, param in params.items():
        step = direction[name]
        if not isinstance(step, Tensor):
            raise ValueError(f"direction[{name!r}] is a {type(step).__name__}, not a tensor")
        if step.shape != param.shape:
            raise ValueError(
                f"direction[{name!r}] has shape {tuple(step.shape)}; params[{name!r}] has {tuple(param.shape)}"
            )
        if not step.is_floating_point():
            raise ValueError(
                f"direction[{name!r}] has dtype {step.dtype}; a direction is made of floating-point tensors"
            )
        if step.device != param.device:
            raise ValueError(f"direction[{name!r}] is on {step.device}; params[{name!r}] is on {param.device}")
    return {name: direction[name].detach().to(param.dtype) for name, param in params.items()}


class Objective:
    """The loss as a function of the parameters: L = Σ sum / Σ count.

    The sums run over the microbatches. Without ``batches``, the only term is loss_fn(params) with count 1.
    """

    def __init__(self, loss_fn: Callable[..., Any], batches: Iterable[Any] | None = None):
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be callable, not a {type(loss_fn).__name__}")
        self.loss_fn = loss_fn
        self.batches = None if batches is None else batches if isinstance(batches, (list, tuple)) else list(batches)
        if self.batches is not None and not self.batches:
            raise ValueError("batches is empty; give at least one microbatch, or leave batches out for loss_fn(params)")

    def terms(self, params: Mapping[str, Tensor], *, twice: bool = False) -> Iterator[tuple[Tensor, float]]:
        """Yield (sum, count) of one microbatch after another.

        No reference to a microbatch remains here after the next is requested.

        Args:
            params: θ by name.
            twice: whether the loss will be differentiated twice. Attention allows this only under SDPBackend.MATH,
                torch.compile not at all (facts 7).
        """
        for batch in self._batches():
            value, count = self.term(params, *batch, twice=twice)
            yield value, check_count(count)
            del value

    def term(self, params: Mapping[str, Tensor], *batch: Any, twice: bool) -> tuple[Tensor, Any]:
        """Return the sum and count of one microbatch, as in `terms`, with an unchecked count.

        Args:
            params: θ by name.
            *batch: the microbatch; nothing for a loss of the parameters alone.
            twice: as in `terms`.
        """
        result = self._evaluate(twice, params, *batch)
        return self._pair(result) if batch else (self._scalar(result), 1.0)

    def evaluate(self, kind: str, function: Callable[..., list[Any]], *trees: Any) -> Iterator[list[Any]]:
        """Yield function(*trees, batch) of one microbatch after another; of a `RecordedLoss`, from its recording.

        Args:
            kind: name of the function.
            function: it calls `term`, and returns tensors, numbers and None.
            *trees: its first arguments, pytrees of tensors.
        """
        for batch in self._batches():
            given = *trees, batch
            yield (
                self.loss_fn.run(kind, function, given) if isinstance(self.loss_fn, RecordedLoss) else function(*given)
            )

    def drop_recordings(self) -> Objective:
        """Return the same objective without recordings."""
        return Objective(self.loss_fn.loss_fn, self.batches) if isinstance(self.loss_fn, RecordedLoss) else self

    def total(self, params: Mapping[str, Tensor], *, twice: bool = True) -> tuple[float, float]:
        """Return Σ sum and Σ count without derivatives.

        Args:
            params: θ by name.
            twice: whether to use the attention of twice differentiable `terms`.
        """

        def function(at: Mapping[str, Tensor], batch: tuple[Any, ...]) -> list[Any]:
            value, count = self.term(at, *batch, twice=twice)
            return [value.detach(), count]

        total = counted = 0.0
        with torch.no_grad():
            for value, count in self.evaluate(f"loss, twice={twice}", function, dict(params)):
                total, counted = total + value.item(), counted + check_count(count)
        return total, counted

    def _batches(self) -> Iterator[tuple[Any, ...]]:
        return iter([()]) if self.batches is None else ((batch,) for batch in self.batches)

    def _evaluate(self, twice: bool, params: Mapping[str, Tensor], *batch: Any) -> Any:
        versions = _versions(params)
        result = self._call(twice, params, *batch)
        written = next((name for name, version in _versions(params).items() if version != versions[name]), None)
        # such a loss changes the next evaluation and the caller's own parameters
        if written is not None:
            raise ValueError(
                f"loss_fn writes into params[{written!r}] in place (nn.Embedding's max_norm does so); curvature "
                "needs a loss that only reads them"
            )
        return result

    def _call(self, twice: bool, *args: Any) -> Any:
        if not twice:
            with disable_checkpointing():
                return self.loss_fn(*args)
        # Compiled code must run as written here. Importing dynamo takes seconds, and code that compiled something has
        # imported it already, with its parts; "torch._dynamo" itself may be a stand-in (`PostponedCompiler`).
        stance = torch.compiler.set_stance("force_eager") if _COMPILING in sys.modules else nullcontext()
        with disable_checkpointing(), sdpa_kernel(SDPBackend.MATH), stance:
            return self.loss_fn(*args)

    def _pair(self, result: Any) -> tuple[Tensor, Any]:
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            found = "tensor" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"with batches, loss_fn(params, batch) returns (sum, count); it returned a {found}")
        return self._scalar(result[0]), result[1]

    @staticmethod
    def _scalar(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ValueError(f"loss_fn returned a {type(loss).__name__}; a scalar tensor is needed")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"loss_fn returned {loss.dtype} of shape {tuple(loss.shape)}; a floating-point scalar is needed"
            )
        return loss.reshape(())


def check_count(count: Any) -> float:
    """Return a microbatch's count as a number.

    Raises:
        ValueError: it is negative or not finite.
    """
    number = float(count)
    if not number >= 0 or math.isinf(number):
        raise ValueError(f"with batches, loss_fn(params, batch) returns (sum, count); it returned the count {number}")
    return number


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of in-place writes to each tensor; 0 for inference tensors."""
    # dispatch by __torch_function__ would cost more than the check
    with DisableTorchFunctionSubclass():
        return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in tensors.items()}


def mean_of(total: float, count: float) -> float:
    """Return total / count.

    Raises:
        ValueError: count is 0.
    """
    if count == 0:
        raise ValueError("the counts of all batches sum to 0; at least one item must be counted")
    return total / count


def dot(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ accumulated in float64.

    float32 sums over millions of products lose the slope's small digits.
    """
    return float(
        sum((x.double() * y.double()).sum() for x, y in zip(_pieces(a.detach()), _pieces(b.detach()), strict=True))
    )


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all tensors, in float64."""
    return math.hypot(
        *(
            float(torch.linalg.vector_norm(piece, dtype=torch.float64))
            for tensor in tensors.values()
            for piece in _pieces(tensor.detach())
        )
    )


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,) if tensor.numel() <= _CHUNK else tensor.reshape(-1).split(_CHUNK)


class RandomState:
    """State of the global generators of torch, Python and numpy at one moment.

    Each `replay` pass starts from it, so dropout and random masks repeat. The global generators are unchanged
    afterwards. Generators of the caller's own are not covered.
    """

    def __init__(self, params: Mapping[str, Tensor]):
        self.devices = sorted({tensor.device.index or 0 for tensor in params.values() if tensor.is_cuda})
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        self.python = random.getstate()
        self.numpy = numpy.random.get_state() if (numpy := _numpy()) else None

    def restore(self) -> None:
        """Set the global generators to this state.

        To be called inside a `replay` block, which undoes it.
        """
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy().random.set_state(self.numpy)

    @contextmanager
    def replay(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.devices), _fork_others():
            self.restore()
            yield


@contextmanager
def _fork_others() -> Iterator[None]:
    python, numpy = random.getstate(), _numpy()
    drawn = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)


def _numpy() -> Any:
    """Return numpy if its generator was imported, else None: nothing was drawn from it."""
    return sys.modules.get("numpy") if "numpy.random" in sys.modules else None


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function and store the activations.

    This covers both variants, reentrant or not.
    """
    # A checkpointed block is computed again in the backward pass. By then functional_call has given the model its own
    # parameters back and contexts such as the attention backend have ended, so the gradient would be of another
    # function. `checkpoint` looks up the two names replaced here on each call, so every import of it is covered.
    own = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    torch_checkpoint.CheckpointFunction = _Direct  # type: ignore[misc, assignment]
    torch_checkpoint._checkpoint_without_reentrant_generator = _do_nothing  # type: ignore[assignment]
    try:
        yield
    finally:
        (
            torch_checkpoint.CheckpointFunction,  # type: ignore[misc]
            torch_checkpoint._checkpoint_without_reentrant_generator,
        ) = own


class _Direct:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _do_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
