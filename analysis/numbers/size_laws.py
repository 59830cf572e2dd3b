"""Fit a law of sizes: log10 of a quantity, linear in log2 of each size that varies, by weighted least squares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.spread import t_975

AXES = ("width", "layers", "steps", "batch")
LEVEL = 0.2  # 80 % intervals
FLOOR_DECADES = 0.05  # smallest scatter of best rates around their law
FLAT_DECADES, FLAT_WITHIN = 0.05, 0.10  # per doubling: a rate that transfers, and the limits of its interval
Size = tuple[float, ...]  # in the order of `AXES`


@dataclass(frozen=True)
class Law:
    """A quantity's log10, linear in log2 of the sizes.

    Attributes:
        axes: places in `AXES` of the sizes that vary.
        origin: smallest size.
        coefficients: value at the origin, then decades per doubling of each axis.
        covariance: of the coefficients.
        scatter: standard deviation around the law, at least `FLOOR_DECADES`.
        degrees: degrees of freedom left.
        resolution: decades between swept rates.
    """

    axes: tuple[int, ...]
    origin: Size
    coefficients: np.ndarray
    covariance: np.ndarray
    scatter: float
    degrees: int
    resolution: float

    def predict(self, size: Size, level: float = LEVEL) -> tuple[float, float]:
        """Return the value at a size and its interval's half-width, at least half the sweep's resolution."""
        row = _row(size, self.origin, self.axes)
        spread = math.sqrt(self.scatter**2 + float(row @ self.covariance @ row))
        half = t_975(self.degrees, level) * spread if self.degrees else math.inf
        return float(row @ self.coefficients), max(half, self.resolution / 2)

    def slope(self, place: int, level: float = LEVEL) -> tuple[float, float]:
        """Return decades per doubling of the axis at a place in `axes`, and the interval's half-width."""
        error = math.sqrt(float(self.covariance[place + 1, place + 1]))
        return float(self.coefficients[place + 1]), t_975(self.degrees, level) * error if self.degrees else math.inf

    def judge(self, place: int) -> str:
        """Return "transfers", "drifts" or "cannot tell" for an axis.

        Transfers: at most `FLAT_DECADES` per doubling, and the 80 % interval within `FLAT_WITHIN`. Drifts: the 95 %
        interval excludes 0.
        """
        value, half = self.slope(place)
        if abs(value) <= FLAT_DECADES and abs(value) + half <= FLAT_WITHIN:
            return "transfers"
        return "drifts" if abs(value) > self.slope(place, 0.05)[1] else "cannot tell"


def _row(size: Size, origin: Size, axes: Sequence[int]) -> np.ndarray:
    return np.array([1.0, *(math.log2(size[axis] / origin[axis]) for axis in axes)])


def fit_law(sizes: Sequence[Size], values: Sequence[float], errors: Sequence[float], resolution: float) -> Law | None:
    """Return a law by weighted least squares; None with a missing value, or if the sizes do not determine it.

    Args:
        sizes: one per value.
        values: log10 of the quantity.
        errors: their standard errors, as weights.
        resolution: decades between swept rates.
    """
    axes = tuple(axis for axis in range(len(AXES)) if len({size[axis] for size in sizes}) > 1)
    if not axes or not np.isfinite(values).all():
        return None
    origin = tuple(min(size[axis] for size in sizes) for axis in range(len(AXES)))
    rows, y = np.array([_row(size, origin, axes) for size in sizes]), np.asarray(values, dtype=float)
    if np.linalg.matrix_rank(rows) < rows.shape[1]:
        return None
    return Law(axes, origin, *_least_squares(rows, y, errors), resolution)


def _least_squares(
    rows: np.ndarray, y: np.ndarray, errors: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Return the coefficients, their covariance, the scatter and the degrees of freedom of a weighted fit."""
    weights = 1 / np.asarray(errors, dtype=float) ** 2
    weights /= weights.mean()
    inverse = np.linalg.inv(rows.T @ (weights[:, None] * rows))
    coefficients = inverse @ rows.T @ (weights * y)
    degrees = len(y) - len(coefficients)
    residual = float(weights @ (y - rows @ coefficients) ** 2)
    scatter = max(math.sqrt(residual / degrees) if degrees else 0.0, FLOOR_DECADES)
    return coefficients, scatter**2 * inverse, scatter, degrees


def find_extra_terms(sizes: Sequence[Size], values: Sequence[float], errors: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the terms that a law needs beyond its slopes (95 %): (place, place) a square, (place, other) a product.

    A term is tried alone, where the sizes determine it and leave a degree of freedom.

    Args:
        sizes: one per value.
        values: log10 of the quantity.
        errors: their standard errors, as weights.
    """
    law = fit_law(sizes, values, errors, 0.0)
    if law is None:
        return []
    rows, y, found = _rows_of(law, sizes), np.asarray(values, dtype=float), []
    for first, second in itertools.combinations_with_replacement(range(len(law.axes)), 2):
        extended = np.column_stack([rows, rows[:, first + 1] * rows[:, second + 1]])
        if np.linalg.matrix_rank(extended) < extended.shape[1] or len(y) <= extended.shape[1]:
            continue
        coefficients, covariance, _, degrees = _least_squares(extended, y, errors)
        if abs(float(coefficients[-1])) > t_975(degrees) * math.sqrt(float(covariance[-1, -1])):
            found.append((law.axes[first], law.axes[second]))
    return found


def determines_product(sizes: Sequence[Size]) -> bool:
    """Return whether sizes that vary on two axes tell how the effects of both depend on each other."""
    law = fit_law(sizes, [0.0] * len(sizes), [1.0] * len(sizes), 0.0)
    if law is None or len(law.axes) != 2:
        return True
    rows = _rows_of(law, sizes)
    return bool(np.linalg.matrix_rank(np.column_stack([rows, rows[:, 1] * rows[:, 2]])) > rows.shape[1])


def _rows_of(law: Law, sizes: Sequence[Size]) -> np.ndarray:
    return np.array([_row(size, law.origin, law.axes) for size in sizes])
