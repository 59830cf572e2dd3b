"""Paired comparisons over seeds, of quantities known exactly or only by bounds. Numbers only; `claims` makes the sentences.

"Wider" compares the one window's lower with the other's upper bound. Where open ends leave that undecided, the parts within the swept
range are compared, if both were swept over the same one, and the result says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from analysis.load import Frame, Study
from analysis.spread import mean_interval
from analysis.stability_window import SeriesWindows
from analysis.step_shares import DIVERGED, MISSING, TERMINAL, counted

HIGHEST_LRS = 2
# Two windows that differ by less are one: a hundredth of a decade is 2.3 % of a learning rate.
TIE_DECADES = 0.01
EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Comparison:
    """Which of two is greater (+1 the first, -1 the second, 0 undecided), on how many paired seeds, over which scope, and the interval."""

    direction: int
    n: int
    scope: Literal["whole", "range", "none"] = "none"
    interval: tuple[float, float] = EVERYTHING
    why_undecided: str = ""


@dataclass(frozen=True)
class StepShares:
    """% stable of two series at the highest LRs that both have results at: means over seeds. ``left_out``: seeds that lack one of the runs; ``diverged``:
    how many of the first's and of the second's runs there diverged."""

    lrs: tuple[float, ...]
    first: float
    second: float
    result: Comparison
    left_out: tuple[int, ...] = ()
    diverged: tuple[int, int] = (0, 0)


def decide(lows: list[float], highs: list[float], tie: float = 0.0) -> tuple[int, tuple[float, float]]:
    """Sign of a paired difference known by a lower and an upper bound per seed: (direction, interval).

    Fewer than three seeds: all must agree, the interval is their range. Three or more: the Student-t 95 % interval of the mean lower (upper)
    bound must exclude 0.
    """
    if not lows:
        return 0, EVERYTHING
    interval = (min(lows), max(highs)) if len(lows) < 3 else (mean_interval(lows)[0], mean_interval(highs)[1])
    return (1 if interval[0] > tie else -1 if interval[1] < -tie else 0), interval


def compare_windows(first: SeriesWindows, second: SeriesWindows) -> Comparison:
    """Whether the first's windows are wider, seed by seed."""
    seeds = sorted(first.by_seed.keys() & second.by_seed.keys())
    pairs = [(first.by_seed[seed], second.by_seed[seed]) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs or len(known) < len(pairs):
        return Comparison(0, len(pairs), why_undecided="in one seed or more a mechanism has no finished run")
    whole, interval = decide([a.width - b.width_max for a, b in known], [a.width_max - b.width for a, b in known], TIE_DECADES)
    if whole:
        return Comparison(whole, len(pairs), "whole", interval)
    if any(a.grid != b.grid for a, b in known):
        return Comparison(0, len(pairs), "none", interval, "the two were swept over different ranges and a window is open or next to a divergence")
    part, interval = decide([a.width - b.width_max_in_grid for a, b in known], [a.width_max_in_grid - b.width for a, b in known], TIE_DECADES)
    if part:
        return Comparison(part, len(pairs), "range", interval)
    if all(a.fills_grid and b.fills_grid for a, b in known):
        return Comparison(0, len(pairs), "none", interval, "both windows fill the whole sweep, a wider range of learning rates would tell")
    return Comparison(0, len(pairs), "none", interval, _undecided(len(pairs)))


def _undecided(n: int) -> str:
    if n >= 3:
        return "the interval of the paired differences contains 0"
    return "the seeds disagree, or edges next to diverged or missing runs leave too much room"


def compare_stable_steps(study: Study, first: str, second: str, state: str, phase: str = TERMINAL) -> StepShares | None:
    """% stable of two series at the two highest LRs at which a seed has a result of both, diverged runs counted (`step_shares`); None where there is none.

    Seed by seed both are taken at the same LRs: a seed that lacks one of the runs is left out.
    """
    count = counted(study, phase, state)
    count = count[count["outcome"] != MISSING]
    hits, steps = ([_by_rate_and_seed(count[count["series"] == name], column) for name in (first, second)] for column in ("hits", "steps"))
    both = steps[0].notna() & steps[1].reindex_like(steps[0]).notna()
    lrs = sorted(both.index[both.any(axis=1)])[-HIGHEST_LRS:]
    seeds = [seed for seed in both.columns if lrs and both.loc[lrs, seed].all()]
    if not seeds:
        return None
    shares = [100 * part.loc[lrs, seeds].sum() / whole.loc[lrs, seeds].sum() for part, whole in zip(hits, steps, strict=True)]
    differences = (shares[0] - shares[1]).tolist()
    direction, interval = decide(differences, differences)
    left_out = sorted({*hits[0].columns, *hits[1].columns} - set(seeds))
    diverged = [_num_diverged(count[(count["series"] == name) & count["run_lr"].isin(lrs) & count["seed"].isin(seeds)]) for name in (first, second)]
    result = Comparison(direction, len(seeds), "whole", interval)
    return StepShares(tuple(lrs), float(shares[0].mean()), float(shares[1].mean()), result, tuple(map(int, left_out)), (diverged[0], diverged[1]))


def _by_rate_and_seed(count: Frame, column: str) -> Frame:
    return count.pivot_table(index="run_lr", columns="seed", values=column, aggfunc="first")


def _num_diverged(count: Frame) -> int:
    return int((count["outcome"] == DIVERGED).sum())
