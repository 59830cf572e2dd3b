"""Compare in pairs what was recorded at checkpoints, diverged runs counted (`step_shares`): % stable steps and median
α_max. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.comparison import Comparison, decide
from analysis.numbers.step_shares import COUNTED, DIVERGED, MEASURED, TERMINAL, counted
from analysis.study.load import Frame, Study

HIGHEST_LRS = 2


@dataclass(frozen=True)
class StepShares:
    """The % stable of two series at the highest LRs that both have results at: means over seeds. ``left_out``: seeds
    that lack one of the runs; ``diverged``: how many of the first's and of the second's runs there diverged.
    ``differences``: by seed, in points."""

    lrs: tuple[float, ...]
    first: float
    second: float
    result: Comparison
    left_out: tuple[int, ...] = ()
    diverged: tuple[int, int] = (0, 0)
    differences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Medians:
    """Median α_max of two series at the same LRs: of the finite medians of the runs measured there (NaN where none is);
    ``result``: of log10 of their ratio, by bounds, and ``differences`` the same by seed (NaN where only a bound is
    known). ``left_out`` and ``diverged``: as in `StepShares`."""

    first: float
    second: float
    result: Comparison
    left_out: tuple[int, ...]
    diverged: tuple[int, int]
    differences: tuple[float, ...]


def highest_lrs(study: Study, names: Sequence[str], state: str, phase: str = TERMINAL) -> tuple[float, ...]:
    """Return the two highest LRs at which some seed has a result of every series."""
    count = counted(study, phase, state)
    count = count[(count["outcome"].isin(COUNTED)) & count["series"].isin(names)]
    series = count.groupby(["run_lr", "seed"])["series"].nunique().unstack()
    return tuple(sorted(series.index[(series == len(set(names))).any(axis=1)])[-HIGHEST_LRS:])


def compare_stable_steps(
    study: Study, first: str, second: str, state: str, phase: str = TERMINAL, lrs: Sequence[float] = ()
) -> StepShares | None:
    """Compare % stable of two series at ``lrs``, by default the `highest_lrs` of both; None where no seed has results
    of both at each of them.

    Seed by seed both are taken at the same LRs: a seed that lacks one of the runs is left out.
    """
    lrs = tuple(lrs) or highest_lrs(study, (first, second), state, phase)
    parts, seeds, left_out = _paired(counted(study, phase, state), (first, second), lrs)
    if not seeds:
        return None
    shares = []
    for part in parts:
        sums = part[part["seed"].isin(seeds)].groupby("seed")[["hits", "steps"]].sum()
        shares.append(100 * sums["hits"] / sums["steps"])
    differences = (shares[0] - shares[1]).tolist()
    direction, interval = decide(differences, differences, limit=100)  # points
    result = Comparison(direction, len(seeds), "whole", interval)
    means = [float(each.mean()) for each in shares]
    return StepShares(lrs, means[0], means[1], result, left_out, _num_diverged(parts, seeds), tuple(differences))


def _paired(count: Frame, names: Sequence[str], lrs: Sequence[float]) -> tuple[list[Frame], list[int], tuple[int, ...]]:
    """Return what counts of both series at the LRs, the seeds at which both have a result at each, and those of either
    that are thereby left out."""
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
    """Compare the median α_max of two series by log10 of their ratio, seed by seed at the same LRs (mean over these);
    None as in `compare_stable_steps`.

    A run that diverged has no α_max. For the comparison alone it is taken to lie below every median that was recorded
    at this phase and below the rate at which it diverged: a rank, as its dash has in the paper's tables, and no value.
    A median of 0 lies below every positive one, too. Where neither run of a seed and LR was measured that LR says
    nothing of the seed.
    """
    count = counted(study, phase, state)
    lrs = tuple(lrs) or highest_lrs(study, (first, second), state, phase)
    parts, seeds, left_out = _paired(count, (first, second), lrs)
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
    result = Comparison(direction, len(known), "whole", interval)
    return Medians(float(medians[0]), float(medians[1]), result, silent, _num_diverged(parts, list(known)), exact)


def _seed_bounds(parts: Sequence[Frame], seed: int, lrs: Sequence[float], floor: float) -> tuple[float, float] | None:
    """Return bounds of log10(first / second), a mean over the LRs that tell; None where none does."""
    pairs = []
    for lr in lrs:
        runs = [part[(part["seed"] == seed) & (part["run_lr"] == lr)].iloc[0] for part in parts]
        if any(run["outcome"] == MEASURED for run in runs):
            (low, high), (other_low, other_high) = (_log_bounds(run, floor) for run in runs)
            pairs.append((low - other_high, high - other_low))
    return (float(np.mean([low for low, _ in pairs])), float(np.mean([high for _, high in pairs]))) if pairs else None


def _log_bounds(run: Frame, floor: float) -> tuple[float, float]:
    """Return the lower and upper bound of log10 α_max of one run."""
    if run["outcome"] == DIVERGED:
        return -math.inf, math.log10(min(run["run_lr"], floor))
    if math.isnan(run["median"]):  # no finite α_max at all: nothing is known of a median of finite ones
        return -math.inf, math.inf
    if run["median"] <= 0:
        return -math.inf, math.log10(floor)
    return math.log10(run["median"]), math.log10(run["median"])
