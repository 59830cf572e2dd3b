"""A trainer asks the same of the devices of its run, whether there is one or there are several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stability.models.backbone import Backbone
from stability.objectives import Examples

Tensors = dict[str, Tensor]  # whole parameters, by their names
State = dict[str, Any]  # of an optimizer, whole
Sums = tuple[Tensor, ...]  # scalars that add up over microbatches, the loss first, as many for each of them
# adds the gradient of a microbatch, which begins at this row of the batch, to the parameters'; its sums
Add = Callable[[Examples, int], Sums]


class Devices(ABC):
    """A run's devices as one of its processes sees them; leaving this context ends the processes of the others.

    ``model`` and ``optimizer`` are those of the process itself, which may hold a part of them only.
    """

    def __enter__(self) -> Devices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end(error)

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """End the other processes. Errors: ``RuntimeError`` with the last words of one that died, where that is what
        ``error`` came of."""

    @abstractmethod
    def described(self) -> dict[str, int]:
        """Return what a row of timings says of them."""

    @abstractmethod
    def tell(self, method: str, *numbers: int) -> None:
        """Have the other processes call one of the methods that they follow (`Replica.FOLLOWED`)."""

    @abstractmethod
    def build(self, make: Callable[[], Backbone]) -> Backbone:
        """Return the model that ``make`` gives on the CPU, placed."""

    @abstractmethod
    def put(self, model: nn.Module, optimizer: Optimizer, parameters: Tensors | None, state: State | None) -> None:
        """Load whole parameters, and the optimizer's whole state where there is one (None: it stays as it is)."""

    @abstractmethod
    def gathered(self, model: Backbone, optimizer: Optimizer) -> tuple[nn.Module, State]:
        """Return the model and the optimizer's state as one device would have them: what a checkpoint holds."""

    @abstractmethod
    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        """Add the gradient of a batch to the parameters'; return its sums. ``rows``: of a microbatch, at most."""

    @abstractmethod
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what of each lies here, as plain tensors that share its memory."""

    @abstractmethod
    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm of all of them together. ``tensors``: parameters, gradients, or what `local` made
        of them."""

    @abstractmethod
    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to the norm ``limit`` where they are above it; return their norm before."""

    @abstractmethod
    def every(self, is_so: bool) -> bool:
        """Return whether it is so in each process."""

    @abstractmethod
    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        """Yield ``function`` of each item, in their order, without gradients."""


def summed(parts: Sequence[Sums]) -> Sums:
    """Return the sums of all microbatches."""
    return tuple(torch.stack(column).sum() for column in zip(*parts, strict=True))
