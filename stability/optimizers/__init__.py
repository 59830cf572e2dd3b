"""Optimizers, one file each.

``build("adamw", model, lr=1e-3)`` builds one over a model's parameters. Optimizers with more than torch's methods have
the protocols below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from stability.optimizers._base import AbstractOptimizer
from stability.optimizers._groups import (
    check_roles,
    group_parameters,
    kinds,
    lr_factor,
    optimizer_of,
    parameter_groups,
    require_matrices,
    roles,
    set_lr,
)

__all__ = [
    "AbstractOptimizer",
    "Averaging",
    "FindingRate",
    "Probing",
    "TakingHessian",
    "build",
    "check_roles",
    "use_averages",
    "group_parameters",
    "kinds",
    "optimizer_of",
    "parameter_groups",
    "require_matrices",
    "roles",
    "lr_factor",
    "set_lr",
    "state_bytes",
]


def build(name: str, of: nn.Module | Iterable[tuple[str, nn.Parameter]], *, lr: float, **settings: Any):
    """Return one optimizer, its parameters grouped by weight decay as in a run.

    A list's parameters are each judged alone; only a model's modules can set the decay of their own parameters. If a
    model defines no roles, an optimizer of matrices steps all two-axis parameters except an ``nn.Embedding``'s.

    Args:
        name: the optimizer's name, e.g. ``adamw``.
        of: a model, or its ``named_parameters()``.
        lr: learning rate.
        settings: fields of the optimizer's Config.

    Raises:
        ValueError: a setting is invalid, or an optimizer of matrices got a list; one line.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    config, part = validate_settings("optimizers", name, settings), Registry("optimizers").load(name)
    # embeddings are recognised by their modules
    if part.takes_matrices and not isinstance(of, nn.Module):
        raise ValueError(f"{name} takes matrices and leaves embeddings alone; give the model, not its parameters")
    model = of if isinstance(of, nn.Module) else _build_module(parameter for _, parameter in of)
    built: optim.Optimizer = optimizer_of(part, config, (), model, lr)
    return built


def _build_module(parameters: Iterable[nn.Parameter]) -> nn.Module:
    """Return a module with the given parameters in their order and without roles."""
    held = nn.Module()
    for number, parameter in enumerate(parameters):
        held.register_parameter(str(number), parameter)
    return held


def state_bytes(optimizer: optim.Optimizer) -> float:
    """Return the optimizer state's bytes per parameter entry.

    Call this after a step: most states are empty before the first. Plain numbers count nothing; a tensor in two places
    counts once.
    """
    held = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(dict(optimizer.state))}
    entries = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return sum(held.values()) / entries


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield a state's tensors at any depth; dict keys do not count."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


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
