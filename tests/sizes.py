"""What of a test's parameters is tried each time, and what by `make slow` alone; and a model's size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from stability.build import build_model
from stability.config.run import RunSpec
from stability.models.backbone import num_parameters
from stability.models.init import without_memory


def count_parameters(spec: RunSpec, data_format: Any) -> int:
    """Return the number of the model's parameters, without allocating memory (torch's meta device)."""
    with without_memory():
        return num_parameters(build_model(spec, data_format))


def with_slow(always: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, or tuples of those of several, the second ones marked slow: they reach no line
    that the first do not."""
    marked = [value if isinstance(value, tuple) else (value,) for value in slow]
    return [*always, *(pytest.param(*values, marks=pytest.mark.slow) for values in marked)]
