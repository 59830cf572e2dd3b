"""A loss with recorded operations: once for each kind of batch, then run without Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stability.curvature._warnings import warn
from stability.curvature.tape import Refused, Tape

_AGREEMENT = 1e-3  # relative difference allowed between a run and the loss itself; both use the same kernels
_MOST_MISSES = 3
_MOST_SHARED = 64 << 20  # bytes; a process holds them while it trains its next run, too


@dataclass(frozen=True)
class _Recording:
    """A tape, and the function's results: numbers and None as recorded, tensors to be taken from the tape."""

    tape: Tape
    results: list[Any]

    def run(self, inputs: list[Tensor]) -> list[Any] | None:
        """Return the results for other inputs; None if the function's branches may differ."""
        if not self.tape.run(inputs):
            return None
        given = iter(self.tape.outputs)
        return [next(given).clone() if isinstance(each, Tensor) else each for each in self.results]


Recordings = dict[Hashable, _Recording | None]  # None: cannot be recorded


class RecordedLoss:
    """A loss for `directional` and its relatives whose operations are recorded and run again, without Python.

    For losses of small models, where calling an operation costs as much as computing it. The numbers are those of
    ``loss_fn``: the same kernels run in the same order. Evaluations by taylor, gradients, and losses alone are
    recorded, each for every shape and dtype of parameters and batch. Other methods call ``loss_fn``.

    ``loss_fn`` must be a function of its arguments and of tensors that it only reads. Its branches may depend on
    numbers in tensors: these numbers are compared in every run, and where they differ ``loss_fn`` itself is evaluated.
    The first run is compared with ``loss_fn``, too. Not recorded: random draws, shapes that depend on numbers, other
    devices than the CPU, and more than 1 GiB of intermediate results; such a loss is evaluated as it is.

    Args:
        loss_fn: the loss, as in `directional`.
        shared: recordings to share with losses of the same operations, such as those of equal models. Those that read
            tensors besides their arguments (buffers), or hold more than 64 MiB, are not shared.
    """

    def __init__(self, loss_fn: Callable[..., Any], shared: Recordings | None = None):
        self.loss_fn = loss_fn
        self._shared: Recordings = {} if shared is None else shared
        self._own: Recordings = {}
        self._trusted: set[Hashable] = set()  # compared with loss_fn at other inputs than the recording's
        self._misses: Counter[Hashable] = Counter()

    def __call__(self, *args: Any) -> Any:
        return self.loss_fn(*args)

    def run(self, kind: str, function: Callable[..., list[Any]], trees: tuple[Any, ...]) -> list[Any]:
        """Return function(*trees), from a recording if there is one.

        Args:
            kind: name of the function.
            function: it evaluates ``loss_fn``, and returns tensors, numbers and None.
            trees: its arguments, pytrees of tensors.
        """
        leaves, spec = tree_flatten(trees)
        key = kind, spec, torch.is_autocast_enabled("cpu"), *map(_describe, leaves)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        recordings = self._own if key in self._own else self._shared
        if key not in recordings:
            return self._record(key, function, leaves, spec)
        recording = recordings[key]
        if recording is None:
            return function(*trees)
        found = recording.run(inputs)
        if key in self._trusted and found is not None:
            return found
        expected = function(*trees)
        if found is not None and all(map(_close, found, expected)):
            self._trusted.add(key)
        else:
            self._forget(key, recordings, contradicted=found is not None)
        return expected

    def _record(self, key: Hashable, function: Callable[..., list[Any]], leaves: list[Any], spec: Any) -> list[Any]:
        results: list[Any] = []

        def call_flat(inputs: list[Tensor]) -> list[Tensor]:
            given = iter(inputs)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            results[:] = function(*tree_unflatten(filled, spec))
            return [each for each in results if isinstance(each, Tensor)]

        try:
            tape = Tape(call_flat, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        except Refused:
            self._own[key] = None
            return function(*tree_unflatten(leaves, spec))
        num_bytes = tape.num_bytes + sum(each.nbytes for each in tape.inputs)
        recordings = self._own if tape.externals or num_bytes > _MOST_SHARED else self._shared
        recordings[key] = _Recording(tape, list(results))
        return results

    def _forget(self, key: Hashable, recordings: Recordings, *, contradicted: bool) -> None:
        """Drop a recording that is of another branch, or gave other numbers; after a few, record no more."""
        self._trusted.discard(key)
        recordings.pop(key)
        self._misses[key] += 1
        if self._misses[key] < _MOST_MISSES:
            return
        self._own[key] = None
        if contradicted:
            warn("the recorded operations of a loss gave other numbers than the loss itself; it is evaluated directly")


def _describe(leaf: Any) -> Hashable:
    """Return the facts about an argument on which a recording depends."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


def _close(a: Any, b: Any) -> bool:
    """Return whether two results agree; not finite ones cannot be compared and do."""
    if not isinstance(b, Tensor):
        return a == b
    gap, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b)
    return not bool(gap > _AGREEMENT * size)
