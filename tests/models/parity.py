"""Models of one seed and any settings, and their weights by other models' names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.config.base import validate
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from tests.identity.golden_ids import BASE
from tests.sizes import count_parameters

SIZE = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 8}
TOKENS = torch.randint(29, (3, 8), generator=torch.Generator().manual_seed(0))


def spec_of(**changes: Any) -> RunSpec:
    return validate(RunSpec, BASE | changes)


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


def twice_in_training(one, other):
    """Return what two calls give that draw the same random numbers, by one seed."""
    found = []
    for call in (one, other):
        torch.manual_seed(11)
        found.append(call())
    return found


def model_of(objective="mlm", **model):
    return ours(29, model=SIZE | model, objective=objective)


def refused(message, **changes):
    with pytest.raises(ValueError) as caught:
        parse_run(json.loads(spec_of().model_dump_json()) | changes)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0
