"""Define the peak learning rates of a sweep: listed, or in equal ratios between two; as they are, or as multiples of
each optimizer's own reference rate."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, model_validator

from stability.config.base import Settings


class EdgeSettings(Settings):
    """Settings of how finely the best rate and the edges of stability are looked for around a coarse range
    (`sweeps.search.edge`)."""

    resolution_decades: float = Field(
        default=0.05, ge=0.02, le=1, description="width of the brackets in which the best rate and both edges end"
    )
    nll_tolerance: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="share of the best NLL by which an NLL may lie above it and still be near it",
    )
    extend_decades: float = Field(
        default=2.0,
        ge=0,
        le=6,
        description="how far beyond low and high rates are tried where an edge or the best lies outside",
    )


class LearningRates(Settings):
    """Either ``values``, or ``num`` rates from ``low`` to ``high`` in equal ratios, rounded to three digits; with
    ``edge`` these are only the first. With ``scaled`` the numbers are no rates but multiples of a reference rate that
    each optimizer has (`AbstractOptimizer.lr_reference`)."""

    items_written_flat: ClassVar[str | None] = "values"
    values: tuple[float, ...] | None = Field(
        default=None, min_length=1, max_length=500, description="the rates themselves"
    )
    low: float | None = Field(default=None, gt=0, description="smallest rate of a range")
    high: float | None = Field(default=None, gt=0, description="largest rate of a range")
    num: int | None = Field(default=None, ge=2, le=500, description="number of rates of a range")
    scaled: bool = Field(
        default=False,
        description="whether values, low and high are multiples of each optimizer's own reference rate (lr=scaled)",
    )
    edge: EdgeSettings | None = Field(
        default=None, description="further rates around the best one and the edges of stability (lr=edge); null: none"
    )

    @model_validator(mode="after")
    def _one_form(self) -> LearningRates:
        """Refuse anything but values alone or low, high and num together, and rates that are not positive, distinct and
        rising."""
        of_range = (self.low, self.high, self.num)
        given = [item is not None for item in of_range]
        if not (all(given) if self.values is None else not any(given)):
            raise ValueError(
                "lr takes either values, or low, high and num together; e.g. lr=1e-3, lr=[1e-4,1e-3] or lr=range "
                "lr.num=9"
            )
        if self.values is not None and (min(self.values) <= 0 or len(set(self.values)) < len(self.values)):
            raise ValueError(
                f"lr.values={list(self.values)} must be positive, distinct numbers of 64 bits (smaller ones than "
                "5e-324 are 0)"
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"lr.low={self.low:g} must be below lr.high={self.high:g}")
        if self.edge is not None and self.values is not None:
            raise ValueError(
                "lr.edge starts from a range and takes no values; give lr=edge lr.low=… lr.high=… lr.num=…"
            )
        if len(set(self.rates())) < len(self.rates()):
            raise ValueError(
                f"lr.num={self.num} rates from {self.low:g} to {self.high:g} are the same in three digits; give "
                "fewer, or a wider range"
            )
        return self

    def rates(self) -> tuple[float, ...]:
        """Return the rates, rising; with ``edge``, those of the first round; with ``scaled``, their multiples."""
        return self._numbers() if self.values is not None else tuple(map(rounded_lr, self._numbers()))

    def rates_of(self, reference: float) -> tuple[float, ...]:
        """Return the rates of an optimizer, rising: with ``scaled`` multiples of its ``reference``, rounded to three
        digits, else those that all have. Errors: ``ValueError`` where two of them are the same then."""
        if not self.scaled:
            return self.rates()
        found = tuple(rounded_lr(number * reference) for number in self._numbers())
        if found[0] <= 0 or len(set(found)) < len(found):
            raise ValueError(
                f"lr.scaled=true: {len(found)} multiples from {self._numbers()[0]:g} to {self._numbers()[-1]:g} of the "
                f"reference rate {reference:g} are not distinct rates in three digits; give fewer, or a wider range"
            )
        return found

    def _numbers(self) -> tuple[float, ...]:
        """Return the listed numbers, or those of the range, rising and not rounded."""
        if self.values is not None:
            return tuple(sorted(self.values))
        assert self.low is not None and self.high is not None and self.num is not None
        ratio = math.log(self.high / self.low) / (self.num - 1)
        return tuple(self.low * math.exp(index * ratio) for index in range(self.num))


def rounded_lr(lr: float) -> float:
    """Return the rate rounded to three digits, so that what is computed twice names the same run."""
    return float(f"{lr:.3g}")
