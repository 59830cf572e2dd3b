"""Find the best learning rate of one curve, NLL against rate, between the swept rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from analysis.numbers.windows import TOLERANCE
from analysis.study.load import Frame
from analysis.words import lr_text


@dataclass(frozen=True)
class Best:
    """The best learning rate of a curve.

    Attributes:
        log_lr: log10 of the rate, mean over seeds; NaN if open.
        error: its standard error in decades, with the resolution of the sweep.
        spacing: decades between neighbouring rates around it.
        open: reason for an unknown best rate; "" if known.
        seeds: number of seeds with a vertex.
    """

    log_lr: float
    error: float
    spacing: float
    open: str
    seeds: int

    @property
    def lr(self) -> float:
        return 10**self.log_lr


def find_vertex(lrs: Iterable[float], nlls: Iterable[float]) -> tuple[float, float, str]:
    """Return the log10 LR of a curve's lowest NLL, the spacing of the rates around it, and why it is unknown.

    The parabola is fitted to the lowest NLL, its neighbours, and theirs if within 5 % of it.

    Args:
        lrs: ascending learning rates.
        nlls: NLL per rate: ∞ if diverged, NaN without a result.

    Returns:
        NaN, NaN and the reason where it is unknown; the reason is "" otherwise.
    """
    pairs = [(math.log10(x), float(y)) for x, y in zip(lrs, nlls, strict=True) if not math.isnan(y)]
    x, y = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    if not np.isfinite(y).any():
        return math.nan, math.nan, "no run finished"
    best = int(np.argmin(y))
    if best in (0, len(y) - 1):
        end, other = ("smallest", "smaller") if best == 0 else ("largest", "larger")
        where = f"the lowest NLL is at the {end} rate swept, {lr_text(10 ** x[best])}"
        return math.nan, math.nan, f"{where}: try {other} ones"
    if not np.isfinite(y[best - 1 : best + 2]).all():
        return math.nan, math.nan, f"runs diverged beside the lowest NLL, at {lr_text(10 ** x[best])}"
    limit = y[best] + TOLERANCE * abs(y[best])
    near = [place for place in (best - 2, best + 2) if 0 <= place < len(y) and y[place] <= limit]
    used = sorted([best - 1, best, best + 1, *near])
    curvature, slope, _ = np.polyfit(x[used] - x[best], y[used], 2)
    if curvature <= 0:
        return math.nan, math.nan, "the curve has no lowest point"
    vertex = float(x[best] - slope / (2 * curvature))
    if not x[used[0]] <= vertex <= x[used[-1]]:
        return math.nan, math.nan, "the curve's lowest point lies outside its neighbours"
    return vertex, float(x[best + 1] - x[best - 1]) / 2, ""


def find_best(table: Frame) -> Best:
    """Return the best rate of a curve; open unless most of the seeds have one.

    Args:
        table: NLL, learning rate × seed.
    """
    found = [find_vertex(table.index, table[seed]) for seed in table if table[seed].notna().any()]
    known = [(vertex, spacing) for vertex, spacing, reason in found if not reason]
    if 2 * len(known) <= len(found):
        reasons = [reason for *_, reason in found if reason]
        return Best(math.nan, math.nan, math.nan, reasons[0] if reasons else "no run finished", len(known))
    vertices, spacing = np.array([each for each, _ in known]), float(np.mean([each for _, each in known]))
    of_seeds = float(vertices.var(ddof=1)) / len(known) if len(known) > 1 else 0.0
    return Best(float(vertices.mean()), math.sqrt(of_seeds + spacing**2 / 12), spacing, "", len(known))


def find_regret(lrs: Iterable[float], nlls: Iterable[float], log_lr: float) -> float:
    """Return the NLL at a rate, interpolated in log10 LR, less the lowest.

    Args:
        lrs: ascending learning rates.
        nlls: NLL per rate: ∞ if diverged, NaN without a result.
        log_lr: log10 of the rate.

    Returns:
        ∞ beside a diverged rate, NaN outside the rates with results.
    """
    pairs = [(math.log10(x), float(y)) for x, y in zip(lrs, nlls, strict=True) if not math.isnan(y)]
    if not pairs or not pairs[0][0] <= log_lr <= pairs[-1][0] or not any(math.isfinite(y) for _, y in pairs):
        return math.nan
    lowest = min(y for _, y in pairs)
    for (left, low), (right, high) in itertools.pairwise(pairs):
        if left <= log_lr <= right:
            share = (log_lr - left) / (right - left)
            ends = [y for y, weight in ((low, 1 - share), (high, share)) if weight > 0]
            return math.inf if any(map(math.isinf, ends)) else (1 - share) * low + share * high - lowest
    return pairs[0][1] - lowest
