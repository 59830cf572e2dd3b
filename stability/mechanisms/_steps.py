"""Draw the steps Δ by which state-space models read continuous time, where training begins (Gu and Dao 2023, section
3.6)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Tensor

Positive = Annotated[float, Field(gt=0)]
Pair = tuple[Positive, Positive]


def rising(mechanism: str) -> AfterValidator:
    """Return the check of a setting that is a range: a `Pair` that does not end before it begins."""

    def check(given: Pair, info: Any) -> Pair:
        if given[0] > given[1]:
            raise ValueError(
                f"mechanism.{mechanism}.{info.field_name}={list(given)} must begin with the smaller number"
            )
        return given

    return AfterValidator(check)


def drawn_steps(num: int, dt_range: tuple[float, float]) -> Float[Tensor, " F"]:
    """Return softplus⁻¹ of ``num`` steps Δ that are drawn log-uniformly from a range: ln(e^Δ − 1), a bias from which
    softplus makes Δ."""
    first, last = (math.log(step) for step in dt_range)
    dt_F = torch.empty(num).uniform_(first, last).exp()
    return dt_F + (-torch.expm1(-dt_F)).log()
