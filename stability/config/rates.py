"""Peak learning rates of a sweep: a list, or a geometric range.

The numbers are rates, or multiples of each optimizer's reference rate.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, model_validator

from stability.config.base import Settings


class EdgeSettings(Settings):
    """Resolution of the search for the best rate and the edges of stability (`sweeps.search.edge`).

    The search starts from a coarse range of rates.
    """

    resolution_decades: float = Field(
        default=0.05, ge=0.02, le=1, description="final width of the brackets around the best rate and both edges"
    )
    nll_tolerance: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="excess over the best NLL, as a share of it, up to which an NLL counts as near it",
    )
    extend_decades: float = Field(
        default=2.0,
        ge=0,
        le=6,
        description="how far beyond low and high rates are tried if an edge or the best rate lies outside",
    )


class LearningRates(Settings):
    """Listed ``values``, or ``num`` rates from ``low`` to ``high`` in equal ratios.

    The rates of a range are rounded to three digits. With ``edge`` they are only the first round. With ``scaled`` the
    numbers are multiples of each optimizer's reference rate (`AbstractOptimizer.lr_reference`).
    """

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
    def _check_form(self) -> LearningRates:
        """Refuse anything but values, or low, high and num; and rates not positive and distinct."""
        of_range = (self.low, self.high, self.num)
        given = [item is not None for item in of_range]
        if not (all(given) if self.values is None else not any(given)):
            raise ValueError(
                "lr takes either values, or low, high and num together; e.g. lr=1e-3, lr=[1e-4,1e-3] or lr=range "
                "lr.num=9"
            )
        if self.values is not None and (min(self.values) <= 0 or len(set(self.values)) < len(self.values)):
            rounded = "; a number below 5e-324 is rounded to 0" if 0 in self.values else ""
            raise ValueError(f"lr.values={list(self.values)} must be positive and distinct{rounded}")
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
        """Return the rates in ascending order: with ``edge`` the first round's, with ``scaled`` the multiples."""
        return self._list_numbers() if self.values is not None else tuple(map(round_lr, self._list_numbers()))

    def rates_of(self, reference: float) -> tuple[float, ...]:
        """Return an optimizer's rates in ascending order.

        With ``scaled`` they are multiples of ``reference``, rounded to three digits; else all optimizers have the same
        rates.

        Raises:
            ValueError: rounding makes two rates equal, or the smallest is 0.
        """
        if not self.scaled:
            return self.rates()
        numbers = self._list_numbers()
        found = tuple(round_lr(number * reference) for number in numbers)
        if found[0] <= 0 or len(set(found)) < len(found):
            raise ValueError(
                f"lr.scaled=true: {len(found)} multiples from {numbers[0]:g} to {numbers[-1]:g} of the "
                f"reference rate {reference:g} are not distinct rates in three digits; give fewer, or a wider range"
            )
        return found

    def _list_numbers(self) -> tuple[float, ...]:
        """Return the numbers of the list or the range, ascending and not rounded."""
        if self.values is not None:
            return tuple(sorted(self.values))
        assert self.low is not None and self.high is not None and self.num is not None
        ratio = math.log(self.high / self.low) / (self.num - 1)
        return tuple(self.low * math.exp(index * ratio) for index in range(self.num))


def round_lr(lr: float) -> float:
    """Return the rate rounded to three digits.

    Equal rates computed in different ways then give one run id.
    """
    return float(f"{lr:.3g}")
