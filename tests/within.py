"""Comparisons of numbers that carry rounding: one assertion, which the margin audit (`tests.margins`) sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# called with the error and the tolerance of every `assert_within`
observers: list[Callable[[float, float], None]] = []


# the last units of a summand that a sum of a few of them may lose
UNITS = 2


def assert_within(error: Any, tolerance: Any, *about: Any) -> None:
    """Assert error ≤ tolerance, entry by entry. NaN fails.

    Args:
        error: A number or tensor ≥ 0; of a tensor every entry counts.
        tolerance: A number, or a tensor that broadcasts with the error.
        about: Printed beside both if they fail.
    """
    errors, tolerances = torch.broadcast_tensors(as_tensor(error).double(), as_tensor(tolerance).double())
    if not errors.numel():
        return
    ratios = torch.where(errors == 0, 0.0, errors / tolerances)
    worst = int(ratios.nan_to_num(nan=torch.inf).argmax())
    one, limit = errors.flatten()[worst].item(), tolerances.flatten()[worst].item()
    for observe in observers:
        observe(one, limit)
    assert bool((errors <= tolerances).all()), f"error {one:.3g} > tolerance {limit:.3g} {' '.join(map(str, about))}"


def rounding_floor(tolerance: float, dtype: torch.dtype, *summed: Tensor) -> float:
    """Return the size below which a sum is its summands' rounding: `UNITS`·eps of the largest, over the tolerance.

    As the floor of `relative_error` it lets a sum that cancels, whose truth may be 0, be off by those units and no more.

    Args:
        tolerance: What the relative error is compared with.
        dtype: What is summed in; narrower ones are summed in float32.
        summed: Tensors as large as the summands, such as the gradients by the other inputs.
    """
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return UNITS * eps / tolerance * max(float(each.detach().double().norm()) for each in summed)


def relative_error(found: Tensor, truth: Tensor, floor: float) -> float:
    """Return ‖found − truth‖ / max(‖truth‖, floor), in float64.

    Args:
        found: A tensor of any float dtype.
        truth: The same in float64.
        floor: > 0: the size below which ‖truth‖ is rounding; see `rounding_floor`.
    """
    assert floor > 0, "a relative error needs a floor: the truth may vanish"
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm()) / max(float(truth.norm()), floor)


def as_tensor(value: Any) -> Tensor:
    """Return numbers, arrays and columns of tables as a tensor on the CPU, without a graph."""
    return value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(np.array(value, order="C"))
