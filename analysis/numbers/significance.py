"""Compute p-values of paired differences, and correct them for many claims in one report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtr, stdtrit

LEVEL = 0.05


def p_beyond(values: Sequence[float], limit: float = 0.0) -> float:
    """Return Student's p-value of a mean above a limit, doubled because both directions are tested.

    Below `LEVEL` exactly if the 95 % interval of the mean lies above the limit.

    Args:
        values: paired differences by seed.
        limit: a number to exceed.

    Returns:
        NaN below three values; 1 if one is not finite.
    """
    array = np.asarray(values, dtype=float)
    if len(array) < 3:
        return math.nan
    if not np.isfinite(array).all():
        return 1.0
    room, error = float(array.mean()) - limit, float(array.std(ddof=1)) / math.sqrt(len(array))
    if error == 0:
        return 0.0 if room > 0 else 1.0
    return min(1.0, 2 * float(stdtr(len(array) - 1, -room / error)))


def p_of_bounds(lows: Sequence[float], highs: Sequence[float], tie: float = 0.0) -> float:
    """Return the smaller p-value of both directions, from lower and upper bounds of the differences.

    Args:
        lows: lower bound by seed.
        highs: upper bound by seed.
        tie: largest absolute difference treated as 0.
    """
    return min(p_beyond(lows, tie), p_beyond([-high for high in highs], tie))


def compare_means(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float], float]:
    """Return the difference of two means, its 95 % interval and its p-value by Welch's t (Biometrika 34:28, 1947).

    Args:
        first: values, two or more.
        second: values whose mean is taken off, two or more.
    """
    samples = [np.asarray(values, dtype=float) for values in (first, second)]
    difference = float(samples[0].mean() - samples[1].mean())
    squares = [float(values.var(ddof=1)) / len(values) for values in samples]
    error = math.sqrt(sum(squares))
    if error == 0:
        return difference, (difference, difference), 0.0 if difference else 1.0
    freedom = error**4 / sum(square**2 / (len(values) - 1) for square, values in zip(squares, samples, strict=True))
    half = error * float(stdtrit(freedom, 1 - LEVEL / 2))
    p = min(1.0, 2 * float(stdtr(freedom, -abs(difference) / error)))
    return difference, (difference - half, difference + half), p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method (Scand. J. Statist. 6:65, 1979).

    The i-th smallest of m is multiplied by m + 1 − i. Corrected values never decrease with the given ones.
    """
    order, corrected, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected
