"""`Whole` keeps all of a run's parameters on one device. `sharded.Shards` splits them among several and has the same
methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stability.models.backbone import Backbone
from stability.objectives import Examples


class Whole:
    """Everything on one device, in one process."""

    def __init__(self, device: torch.device):
        self._device = device

    def __enter__(self) -> Whole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End nothing: there are no other processes."""

    def described(self) -> dict[str, int]:
        """Return what a row of timings says of the device."""
        return {}

    def build(self, make: Callable[[], Backbone]) -> Backbone:
        """The model that ``make`` gives on the CPU, placed."""
        return make().to(self._device)

    def tell(self, method: str, *numbers: int) -> None:
        """Announce a method of the `Trainer` that all processes go through together, before this process does. One
        device has nobody to tell."""

    def part(self, examples: Examples) -> Examples:
        """The rows of a batch that this process computes: here all of them."""
        return examples

    def total(self, part: Tensor) -> Tensor:
        """The sum over the processes of what each has of a scalar."""
        return part

    def local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return what of each tensor lies here, as plain tensors that share its memory."""
        return [tensor.detach() for tensor in tensors]

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm of all of them together. ``tensors``: parameters, gradients, or what `local` made of
        them."""
        return nn.utils.get_total_norm(tensors)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to the norm ``limit`` where they are above it; their norm before."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def every(self, is_so: bool) -> bool:
        """Return whether it is so in each process."""
        return is_so

    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        """``function`` of each item, in their order, without gradients."""
        return map(function, items)

    def put(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, Tensor] | None,
        state: dict[str, Any] | None,
    ) -> None:
        """Load whole parameters, and the optimizer's whole state where there is one (None: it stays as it is)."""
        assert parameters is not None
        model.load_state_dict(parameters)
        if state is not None:
            optimizer.load_state_dict(state)

    def gathered(self, model: Backbone, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, dict[str, Any]]:
        """The model and the optimizer's state as one device would have them: what a checkpoint holds."""
        return model, optimizer.state_dict()
