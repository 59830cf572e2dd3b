"""Update rules of optimizers that need more than a gradient, or keep two sets of weights, from the papers' formulas."""

from __future__ import annotations

from typing import Any

LOOPS: dict[str, Any] = {}
TENSOR_LOOPS: dict[str, Any] = {}
