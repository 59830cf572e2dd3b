"""The peak learning rates of a sweep."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from stability.validation import Settings


class LearningRates(Settings):
    """Either ``values``, or ``num`` rates from ``low`` to ``high`` in equal ratios, rounded to three digits."""

    values: tuple[float, ...] | None = Field(default=None, min_length=1, description="the rates themselves")
    low: float | None = Field(default=None, gt=0, description="smallest rate of a range")
    high: float | None = Field(default=None, gt=0, description="largest rate of a range")
    num: int | None = Field(default=None, ge=2, description="number of rates of a range")

    @model_validator(mode="after")
    def _one_form(self) -> LearningRates:
        of_range = (self.low, self.high, self.num)
        given = [item is not None for item in of_range]
        if not (all(given) if self.values is None else not any(given)):
            raise ValueError("lr takes either values, or low, high and num together; e.g. lr=1e-3, lr=[1e-4,1e-3] or lr=range lr.num=9")
        if self.values is not None and (min(self.values) <= 0 or len(set(self.values)) < len(self.values)):
            raise ValueError(f"lr.values={list(self.values)} must be positive and distinct")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"lr.low={self.low:g} must be below lr.high={self.high:g}")
        return self

    def rates(self) -> tuple[float, ...]:
        if self.values is not None:
            return tuple(sorted(self.values))
        assert self.low is not None and self.high is not None and self.num is not None
        ratio = math.log(self.high / self.low) / (self.num - 1)
        return tuple(float(f"{self.low * math.exp(index * ratio):.3g}") for index in range(self.num))
