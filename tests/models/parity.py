"""A model of ours and a public one get the same weights by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stability.build import build_model, count_parameters
from stability.config.base import checked
from stability.config.run import RunSpec
from tests.identity.golden_ids import BASE


def spec_of(**changes: Any) -> RunSpec:
    return checked(RunSpec, BASE | changes)


def ours(data_format: Any, **changes: Any) -> nn.Module:
    return build_model(spec_of(**changes), data_format)


def num_ours(data_format: Any, **changes: Any) -> int:
    return count_parameters(spec_of(**changes), data_format)


def renamed(state: dict[str, torch.Tensor], names: tuple[tuple[str, str], ...]) -> dict[str, torch.Tensor]:
    """Return the state under the names that the pairs (theirs, ours) make, each pair replaced wherever it occurs."""
    found = {}
    for key, value in state.items():
        for theirs, own in names:
            key = key.replace(theirs, own)
        found[key] = value
    return found


def shaken(model: nn.Module, size: float = 0.3) -> nn.Module:
    """Return the model in float64 with every parameter moved at random, so that none is zero, or one, any more."""
    generator = torch.Generator().manual_seed(5)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model
