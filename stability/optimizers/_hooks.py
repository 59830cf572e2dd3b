"""Optimizers may have more than torch's methods: means of their weights, needs of their own, a rate that they find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class Averaging(Protocol):
    """An optimizer that moves other weights than those that are validated, sampled from and kept."""

    def averaged(self) -> dict[Tensor, Tensor]:
        """Return for each parameter the weights that stand for it, a tensor of their own; nothing moves."""
        ...


@runtime_checkable
class TakingHessian(Protocol):
    """An optimizer that needs an estimate of the Hessian's diagonal from outside before some of its steps."""

    def hessian_is_due(self) -> bool:
        """Return whether the step that comes next is one of those before which a new estimate is taken in."""
        ...

    def take_hessian(self, diagonal: Mapping[Tensor, Tensor]) -> None:
        """Take an estimate in: a tensor of its shape for each parameter."""
        ...


@runtime_checkable
class FindingRate(Protocol):
    """An optimizer that finds a rate by itself, which its learning rate multiplies."""

    def rate_found(self) -> float:
        """Return the rate of the step that comes next, the learning rate in it."""
        ...


@runtime_checkable
class Probing(Protocol):
    """An optimizer whose step adds up what it did on its way."""

    def probed(self) -> Any:
        """Return the sums of the last step (`kernels.adamw_probe.Probe`); None where no parameter was stepped."""
        ...


@contextmanager
def evaluated(optimizer: Optimizer) -> Iterator[None]:
    """Have the parameters hold the weights that stand for them while this is entered, where the optimizer averages;
    then their own again, bit for bit."""
    if not isinstance(optimizer, Averaging):
        yield
        return
    with torch.no_grad():
        averages = optimizer.averaged()
        own = {parameter: parameter.detach().clone() for parameter in averages}
        _put(averages)
    try:
        yield
    finally:
        _put(own)


@torch.no_grad()
def _put(values: Mapping[Tensor, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)
