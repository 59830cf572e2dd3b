"""Update rules of one tensor in float64 numpy, from the papers' formulas: they share no code with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# θ after the steps, from its first value, its gradients and the rates
Loop = Callable[[Any, np.ndarray, list[np.ndarray], list[float]], np.ndarray]

LOOPS: dict[str, Loop] = {}
