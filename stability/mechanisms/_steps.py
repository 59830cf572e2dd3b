"""Initial steps Δ for state-space models (Gu and Dao 2023, section 3.6)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Tensor

Positive = Annotated[float, Field(gt=0)]
Pair = tuple[Positive, Positive]


def require_rising(mechanism: str) -> AfterValidator:
    """Return a validator for a range setting: a `Pair` with first ≤ second."""

    def check(given: Pair, info: Any) -> Pair:
        if given[0] > given[1]:
            raise ValueError(
                f"mechanism.{mechanism}.{info.field_name}={list(given)} must begin with the smaller number"
            )
        return given

    return AfterValidator(check)


def draw_steps(num: int, dt_range: tuple[float, float]) -> Float[Tensor, " F"]:
    """Return softplus⁻¹(Δ) = ln(e^Δ − 1) for ``num`` steps Δ, log-uniform in ``dt_range``.

    As a bias before softplus it yields Δ.
    """
    first, last = (math.log(step) for step in dt_range)
    dt_F = torch.empty(num).uniform_(first, last).exp()
    return dt_F + (-torch.expm1(-dt_F)).log()
