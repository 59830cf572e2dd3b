"""Compare checkpoints' % stable steps and median α_max in pairs, diverged runs included (`step_shares`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.comparison import Comparison, decide
from analysis.numbers.spread import p_of_bounds
from analysis.numbers.step_shares import COUNTED, DIVERGED, MEASURED, TERMINAL, count_stable_steps
from analysis.study.load import Frame, Study

HIGHEST_LRS = 2


@dataclass(frozen=True)
class StepShares:
    """% stable for two series at their highest common LRs, as means over seeds.

    Attributes:
        lrs: the compared rates.
        first, second: % stable.
        result: comparison in points.
        left_out: seeds lacking one of the runs.
        diverged: number of diverged runs in the first and the second.
        differences: by seed, in points.
    """

    lrs: tuple[float, ...]
    first: float
    second: float
    result: Comparison
    left_out: tuple[int, ...] = ()
    diverged: tuple[int, int] = (0, 0)
    differences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Medians:
    """Median α_max for two series at equal LRs.

    Attributes:
        first, second: median over measured runs' finite medians; NaN if none.
        result: comparison of log10(first / second), by bounds.
        left_out, diverged: as in `StepShares`.
        differences: log10 ratio by seed; NaN for a bound.
    """

    first: float
    second: float
    result: Comparison
    left_out: tuple[int, ...]
    diverged: tuple[int, int]
    differences: tuple[float, ...]


def highest_lrs(study: Study, names: Sequence[str], state: str, phase: str = TERMINAL) -> tuple[float, ...]:
    """Return the two highest LRs at which some seed has results for every series.

    Args:
        study: supplies the steps.
        names: series.
        state: optimizer state.
        phase: checkpoint phase.
    """
    count = count_stable_steps(study, phase, state)
    count = count[(count["outcome"].isin(COUNTED)) & count["series"].isin(names)]
    series = count.groupby(["run_lr", "seed"])["series"].nunique().unstack()
    return tuple(sorted(series.index[(series == len(set(names))).any(axis=1)])[-HIGHEST_LRS:])


def compare_stable_steps(
    study: Study, first: str, second: str, state: str, phase: str = TERMINAL, lrs: Sequence[float] = ()
) -> StepShares | None:
    """Compare two series' % stable at equal LRs, seed by seed.

    A seed lacking one of the runs is left out.

    Args:
        study: supplies the steps.
        first: name of one series.
        second: name of the other.
        state: optimizer state.
        phase: checkpoint phase.
        lrs: learning rates; by default the `highest_lrs` of both.

    Returns:
        None without a complete seed.
    """
    lrs = tuple(lrs) or highest_lrs(study, (first, second), state, phase)
    parts, seeds, left_out = _pair(count_stable_steps(study, phase, state), (first, second), lrs)
    if not seeds:
        return None
    shares = []
    for part in parts:
        sums = part[part["seed"].isin(seeds)].groupby("seed")[["hits", "steps"]].sum()
        shares.append(100 * sums["hits"] / sums["steps"])
    differences = (shares[0] - shares[1]).tolist()
    direction, interval = decide(differences, differences, limit=100)  # points
    size, p = float(np.mean(differences)), p_of_bounds(differences, differences)
    result = Comparison(direction, len(seeds), "whole", interval, "", tuple(differences), p, (size, size))
    means = [float(each.mean()) for each in shares]
    return StepShares(lrs, means[0], means[1], result, left_out, _num_diverged(parts, seeds), tuple(differences))


def _pair(count: Frame, names: Sequence[str], lrs: Sequence[float]) -> tuple[list[Frame], list[int], tuple[int, ...]]:
    """Return both series' counted rows, the seeds complete in both, and the seeds left out."""
    count = count[count["run_lr"].isin(lrs) & count["outcome"].isin(COUNTED)]
    parts = [count[count["series"] == name] for name in names]
    whole = [set(part.groupby("seed")["run_lr"].nunique().loc[lambda rates: rates == len(lrs)].index) for part in parts]
    seeds = sorted(int(seed) for seed in whole[0] & whole[1]) if lrs else []
    some = {int(seed) for part in parts for seed in part["seed"]}
    return parts, seeds, tuple(sorted(some - set(seeds)))


def _num_diverged(parts: Sequence[Frame], seeds: Collection[int]) -> tuple[int, int]:
    first, second = (int((part[part["seed"].isin(seeds)]["outcome"] == DIVERGED).sum()) for part in parts)
    return first, second


def compare_medians(
    study: Study, first: str, second: str, state: str, phase: str = TERMINAL, lrs: Sequence[float] = ()
) -> Medians | None:
    """Compare two series' median α_max by log10 of their ratio, seed by seed.

    The ratio is averaged over equal LRs. If neither run of a seed and LR was measured, this LR is left out for the
    seed.

    Args:
        study: supplies the steps.
        first: name of one series.
        second: name of the other.
        state: optimizer state.
        phase: checkpoint phase.
        lrs: learning rates; by default the `highest_lrs` of both.

    Returns:
        None without a comparable seed.
    """
    count = count_stable_steps(study, phase, state)
    lrs = tuple(lrs) or highest_lrs(study, (first, second), state, phase)
    parts, seeds, left_out = _pair(count, (first, second), lrs)
    positive = count.loc[count["median"] > 0, "median"]
    floor = float(positive.min()) if len(positive) else 1.0
    known = {seed: bounds for seed in seeds if (bounds := _seed_bounds(parts, seed, lrs, floor)) is not None}
    if not known:
        return None
    lows, highs = ([bounds[side] for bounds in known.values()] for side in (0, 1))
    direction, interval = decide(lows, highs)
    exact = tuple(low if low == high else math.nan for low, high in zip(lows, highs, strict=True))
    medians = [part.loc[part["seed"].isin(known) & (part["outcome"] == MEASURED), "median"].median() for part in parts]
    silent = tuple(sorted({*left_out, *(set(seeds) - known.keys())}))
    result = Comparison(direction, len(known), "whole", interval, p=p_of_bounds(lows, highs))
    return Medians(float(medians[0]), float(medians[1]), result, silent, _num_diverged(parts, list(known)), exact)


def _seed_bounds(parts: Sequence[Frame], seed: int, lrs: Sequence[float], floor: float) -> tuple[float, float] | None:
    """Return bounds on log10(first / second), averaged over informative LRs; None if none is."""
    pairs = []
    for lr in lrs:
        runs = [part[(part["seed"] == seed) & (part["run_lr"] == lr)].iloc[0] for part in parts]
        if any(run["outcome"] == MEASURED for run in runs):
            (low, high), (other_low, other_high) = (_log_bounds(run, floor) for run in runs)
            pairs.append((low - other_high, high - other_low))
    return (float(np.mean([low for low, _ in pairs])), float(np.mean([high for _, high in pairs]))) if pairs else None


def _log_bounds(run: Frame, floor: float) -> tuple[float, float]:
    """Return lower and upper bounds on one run's log10 α_max."""
    # A diverged run has no α_max. Like the dash in the paper's tables it is a rank without a value: below all recorded
    # medians in this phase and below its own rate. A median of 0 also lies below all positive ones.
    if run["outcome"] == DIVERGED:
        return -math.inf, math.log10(min(run["run_lr"], floor))
    if math.isnan(run["median"]):  # without finite α_max the median of finite values is unknown
        return -math.inf, math.inf
    if run["median"] <= 0:
        return -math.inf, math.log10(floor)
    return math.log10(run["median"]), math.log10(run["median"])
