"""A run on one device, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stability.models.backbone import Backbone
from stability.objectives import Examples
from stability.training.devices.base import Add, Devices, State, Sums, Tensors, add_sums, norms_of_groups


class OneDevice(Devices):
    """The only device of a run, with everything in one process."""

    def __init__(self, device: torch.device):
        self._device = device

    def end(self, error: BaseException | None) -> None:
        """End nothing: there are no other processes."""

    def describe(self) -> dict[str, int]:
        return {}

    def tell(self, method: str, *numbers: int) -> None:
        """Send nothing: there are no other processes."""

    def build(self, make: Callable[[], Backbone]) -> Backbone:
        return make().to(self._device)

    def put(self, model: nn.Module, optimizer: Optimizer, parameters: Tensors | None, state: State | None) -> None:
        assert parameters is not None
        model.load_state_dict(parameters)
        if state is not None:
            optimizer.load_state_dict(state)

    def gather(self, model: Backbone, optimizer: Optimizer) -> tuple[nn.Module, State]:
        return model, optimizer.state_dict()

    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        return add_sums([add(part, rows * index) for index, part in enumerate(examples.split(rows))])

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(tensors)

    def norms(self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
        return norms_of_groups(tensors, groups)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        if math.isinf(limit):  # an infinite norm over it would be NaN
            return self.norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return nn.utils.clip_grad_norm_(parameters, limit)

    def all_true(self, is_so: bool) -> bool:
        return is_so

    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        return map(function, items)
