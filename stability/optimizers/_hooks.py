"""Protocols for optimizers with more than torch's methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class Averaging(Protocol):
    """An optimizer that trains other weights than those validated, sampled from and saved."""

    def averaged(self) -> dict[Tensor, Tensor]:
        """Return the averaged weights of each parameter as new tensors; nothing is changed."""
        ...


@runtime_checkable
class TakingHessian(Protocol):
    """An optimizer with steps that need an external estimate of the Hessian's diagonal."""

    def hessian_is_due(self) -> bool:
        """Return whether the next step needs a new estimate first."""
        ...

    def take_hessian(self, diagonal: Mapping[Tensor, Tensor]) -> None:
        """Add an estimate, one tensor in each parameter's shape."""
        ...


@runtime_checkable
class FindingRate(Protocol):
    """An optimizer that finds its own rate; the learning rate multiplies that rate."""

    def rate_found(self) -> float:
        """Return the rate of the next step, learning rate included."""
        ...


@runtime_checkable
class Probing(Protocol):
    """An optimizer that sums statistics of its step during the step."""

    def probed(self) -> Any:
        """Return the sums of the last step (`kernels.adamw_probe.Probe`); None if no parameter was stepped."""
        ...


@contextmanager
def use_averages(optimizer: Optimizer) -> Iterator[None]:
    """Set the parameters to their averages within the block, if the optimizer averages.

    Afterwards their own values are restored bit for bit.
    """
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
