"""The state of an optimizer, and how large it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
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
