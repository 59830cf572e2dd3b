"""Other values of an optimizer's settings than their defaults, such as change its steps."""

from __future__ import annotations

from typing import Any

from stability.registry import Registry
from tests.settings import other_value

# Floors, which bind only where they are about as large as the toy's gradients and parameters.
FLOORS = {("adopt", "epsilon"): 0.5, ("adafactor", "epsilon2"): 2.0}
# What a setting needs beside it to be taken.
NEEDED = {("sgd", "nesterov"): {"momentum": 0.9}}


def other(name: str, field: str) -> Any:
    """Return another value of an optimizer's setting than the default."""
    return FLOORS.get((name, field), other_value(Registry("optimizers").load(name).Config, field))


def others(name: str) -> dict[str, Any]:
    """Return all settings of an optimizer at other values."""
    return {field: other(name, field) for field in Registry("optimizers").load(name).Config.model_fields}
