"""What of a test's parameters is tried each time, and what by `make slow` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def with_slow(always: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, or tuples of those of several, the second ones marked slow: they reach no line
    that the first do not."""
    marked = [value if isinstance(value, tuple) else (value,) for value in slow]
    return [*always, *(pytest.param(*values, marks=pytest.mark.slow) for values in marked)]
