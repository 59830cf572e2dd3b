"""Other values of an optimizer's settings than their defaults, such as change its steps."""

from __future__ import annotations

from typing import Any

from stability.registry import Registry
from tests.settings import other_value

# Values that say something within a few steps of the toy, where another value of the type says nothing: floors, which
# bind only where they are about as large as its gradients and parameters; numbers of steps; limits of its few rows.
TELLING = {
    ("adopt", "epsilon"): 0.5,
    ("adafactor", "epsilon2"): 2.0,
    ("galore_adamw", "every"): 2,
    ("galore_adamw", "rank_share"): 0.75,
    ("shampoo", "every"): 3,
    ("shampoo", "max_dimension"): 3,
    ("soap", "every"): 1,
    ("soap", "max_dimension"): 3,
}
# What a setting needs beside it to be taken.
NEEDED = {("sgd", "nesterov"): {"momentum": 0.9}}


def other(name: str, field: str) -> Any:
    """Return another value of an optimizer's setting than the default."""
    return TELLING.get((name, field), other_value(Registry("optimizers").load(name).Config, field))


def others(name: str) -> dict[str, Any]:
    """Return all settings of an optimizer at other values."""
    return {field: other(name, field) for field in Registry("optimizers").load(name).Config.model_fields}
