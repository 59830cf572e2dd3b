"""Optimizers, one file each. ``build("adamw", model, lr=1e-3)`` makes one over a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn, optim

from stability.optimizers._base import AbstractOptimizer
from stability.optimizers._groups import (
    check_roles,
    grouped,
    kinds,
    optimizer_of,
    parameter_groups,
    require_matrices,
    roles,
    set_lr,
)
from stability.optimizers._hooks import Averaging, FindingRate, Probing, TakingHessian, evaluated

__all__ = [
    "AbstractOptimizer",
    "Averaging",
    "FindingRate",
    "Probing",
    "TakingHessian",
    "build",
    "check_roles",
    "evaluated",
    "grouped",
    "kinds",
    "optimizer_of",
    "parameter_groups",
    "require_matrices",
    "roles",
    "set_lr",
    "state_bytes",
]


def build(name: str, of: nn.Module | Iterable[tuple[str, nn.Parameter]], *, lr: float, **settings: Any):
    """Return one optimizer as a ``torch.optim.Optimizer``, its parameters grouped by weight decay as a run groups them.

    ``of``: a model, or its ``named_parameters()``. What a model's modules say of the decay of their own parameters is
    heard of a model only; of a list each parameter is judged alone. ``settings``: the fields of the optimizer's Config.

    Errors: ``ValueError`` of one line, also for the list of an optimizer that takes matrices: it has to see the modules
    to know an embedding. Of a model that says no roles it takes all parameters of two axes but an ``nn.Embedding``'s.
    """
    from stability.config.parts import settings_of
    from stability.registry import Registry

    config, part = settings_of("optimizers", name, settings), Registry("optimizers").load(name)
    if part.takes_matrices and not isinstance(of, nn.Module):
        raise ValueError(f"{name} takes matrices and leaves embeddings alone; give the model, not its parameters")
    model = of if isinstance(of, nn.Module) else _holding(parameter for _, parameter in of)
    built: optim.Optimizer = optimizer_of(part, config, (), model, lr)
    return built


def _holding(parameters: Iterable[nn.Parameter]) -> nn.Module:
    """Return a module that holds parameters in their order and says nothing of them."""
    held = nn.Module()
    for number, parameter in enumerate(parameters):
        held.register_parameter(str(number), parameter)
    return held


def state_bytes(optimizer: optim.Optimizer) -> float:
    """Return the bytes of the tensors in an optimizer's state over the number of its parameters' entries, after as many
    steps as it has taken: before the first most have none. Plain numbers count nothing, and a tensor that stands in two
    places counts once."""
    held = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(dict(optimizer.state))}
    entries = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return sum(held.values()) / entries


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a state holds at any depth; keys do not count."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
