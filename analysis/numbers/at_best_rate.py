"""Compute the numbers for comparing optimizers or mechanisms, each at its own best rate.

They are NLL, room above the best rate, α_max over the rate in force, sensitivity, and the size and cost of a step. A
series' best rate has the lowest median NLL over seeds; a divergence counts as ∞.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.numbers.spread import Spread
from analysis.numbers.step_shares import TERMINAL, finite_median, recorded_steps
from analysis.numbers.windows import Window, outcomes, windows
from analysis.study.load import ENDED, HAS_RESULT, Frame, Study
from analysis.study.once import once_per_study


@dataclass(frozen=True)
class Sensitivity:
    """One series' sensitivity to the learning rate.

    Attributes:
        series: name.
        by_seed: in nats.
        spread: over seeds.
        num_rates: rates averaged over, the fewest among seeds.
    """

    series: str
    by_seed: dict[int, float]
    spread: Spread
    num_rates: int


def sensitivity(study: Study, series: str, rates: Collection[float] = ()) -> Sensitivity:
    """Return the learning-rate sensitivity per seed, in nats.

    This is the mean over swept rates of min(NLL, NLL at initialisation), minus the sweep's best NLL (Wortsman et al.
    2024, arXiv:2309.14322, Section 3: E_η[min(ℓ(A(η)), ℓ₀) − ℓ*]). 0 means all rates are as good as the best.

    Every swept rate has equal weight, so values depend on the swept range: compare series within one study only. A
    diverged run counts as its initial NLL. Failed or unfinished runs are left out. A seed without a finished run has no
    sensitivity.

    Args:
        study: supplies the runs.
        series: name of the series.
        rates: rates to average over; by default all that were swept.
    """
    by_seed, number = {}, []
    of_series = study.of(series)
    for seed, runs in (of_series[of_series["lr"].isin(rates)] if rates else of_series).groupby("seed"):
        losses, finished = _cap(runs), runs[runs["status"].isin(HAS_RESULT)]
        if np.isfinite(finished["val_nll"]).any():
            by_seed[int(seed)] = float(np.mean(losses) - np.min(losses))
            number.append(len(losses))
    # Smallest and largest: no seed can lose more than the distance from its initial NLL to its best. If only some seeds
    # diverged at a rate there are two clusters, and an interval on logarithms would end far beyond the possible range.
    return Sensitivity(series, by_seed, Spread.of(by_seed.values()), min(number, default=0))


def _cap(runs: Frame) -> list[float]:
    """Return min(NLL, initial NLL) for every finished or diverged run."""
    known = runs[runs["status"].isin(ENDED)]
    pairs = zip(
        known["val_nll"].where(known["status"] != "diverged", math.inf).fillna(math.inf), known["init_nll"], strict=True
    )
    return [value for nll, init in pairs if math.isfinite(value := min(nll, init if math.isfinite(init) else math.inf))]


OWN_STATE = "checkpoint"  # the only optimizer state defined for all optimizers
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Numbers:
    """One series' numbers at its best rate.

    Everything at the best rate is NaN if all runs diverged.

    Attributes:
        series, name: the series, and its short name within the comparison.
        best: best rate over the reference rate.
        best_lr: best rate as in the study's tables.
        window: stable window of the median over seeds.
        nll: NLL over seeds.
        to_stable: bounds in decades from the best rate to the largest rate with a stable verdict in every seed; NaN if
            none.
        to_near: bounds in decades to the rate at which the median NLL leaves 5 % of the best.
        ratio: α_max over the rate in force, per-run medians, over seeds.
        sensitivity: in nats.
        rms_u: RMS of the step direction u, over seeds.
        rms_step: RMS of u times the rate, over seeds.
        num_params: median over runs.
        optimizer_bytes: optimizer state per parameter.
        state_bytes: mixers' state after one sequence, needed to continue reading; NaN if impossible or not recorded.
        step_s: median step time over runs, by seed, in seconds.
        num_runs: all runs.
        by_seed: bounds by compared quantity and seed.
    """

    series: str
    name: str
    best: float
    best_lr: float
    window: Window | None
    nll: Spread
    to_stable: Bounds
    to_near: Bounds
    ratio: Spread
    sensitivity: Spread
    rms_u: Spread
    rms_step: Spread
    num_params: float
    optimizer_bytes: float
    state_bytes: float
    step_s: Mapping[int, float]
    num_runs: int
    diverged: Mapping[float, tuple[int, int]]  # by rate over the reference: (diverged, all) runs
    by_seed: Mapping[str, Mapping[int, Bounds]]

    @property
    def num_diverged(self) -> int:
        return sum(count for count, _ in self.diverged.values())


def numbers_of(study: Study, names: Mapping[str, str], references: Mapping[str, float]) -> dict[str, Numbers]:
    """Return the numbers for several series.

    Args:
        study: supplies the runs.
        names: short name by series.
        references: reference rate by short name; 1 if missing.
    """
    return {series: _numbers(study, series, name, references.get(name, 1.0)) for series, name in names.items()}


@once_per_study
def _numbers(study: Study, series: str, name: str, reference: float) -> Numbers:
    """Return one series' numbers."""
    found, runs = windows(study)[series], study.of(series)
    median, table = found.median, outcomes(study, series)
    edge = edges_of(study).get(series)  # its row from `lr=edge`, None for a grid
    best_lr = math.nan if median is None else median.best_lr
    on_axis = 1.0 if study.is_in_multiples else reference
    rows = recorded_steps(study, TERMINAL, OWN_STATE)
    rows = rows[(rows["series"] == series) & (rows["run_lr"] == best_lr)]
    steps = rows.assign(lr=rows["lr"].fillna(rows["run_lr"]))
    ratios = (steps["alpha_max"] / steps["lr"]).groupby(steps["run_id"]).apply(finite_median)
    sizes = steps.groupby("run_id")["rms_u"].mean()
    raw = reference if study.is_in_multiples else 1.0  # converts the tables' rates into real learning rates
    moved = (steps["rms_u"] * steps["lr"] * raw).groupby(steps["run_id"]).mean()
    mistuned = sensitivity(study, series)
    at_best = table.loc[best_lr] if best_lr in table.index else table.iloc[0] * math.nan
    finished = runs[runs["status"].isin(HAS_RESULT)]
    # a seed without a finite NLL counts only if all its runs diverged, not if others are missing
    known = {seed for seed in table.columns if np.isfinite(table[seed]).any() or np.isposinf(table[seed]).all()}
    own = {seed: each for seed, each in found.by_seed.items() if seed in known}
    return Numbers(
        series=series,
        name=name,
        best=best_lr / on_axis,
        best_lr=best_lr,
        window=median,
        nll=Spread.of(at_best),
        to_stable=_stable_bounds(runs, best_lr) if edge is None else _edge_bounds(edge),
        to_near=(math.nan, math.nan) if median is None else room(median),
        ratio=Spread.of(ratios.to_numpy()),
        sensitivity=mistuned.spread,
        rms_u=Spread.of(sizes),
        rms_step=Spread.of(moved),
        num_params=float(runs["num_params"].median()),
        optimizer_bytes=float((finished["optimizer_state_bytes"] / finished["num_params"]).median()),
        state_bytes=float(runs["state_bytes"].median()),
        step_s={int(seed): float(part["step_s"].median()) for seed, part in finished.groupby("seed")},
        num_runs=len(runs),
        diverged={
            lr / on_axis: (int((part["status"] == "diverged").sum()), len(part)) for lr, part in runs.groupby("lr")
        },
        by_seed={
            "nll": {int(seed): _exactly(float(np.nanmin(table[seed]))) for seed in table.columns if seed in known},
            "room": {seed: (0.0, 0.0) if each is None else room(each) for seed, each in own.items()},
            "ratio": {
                int(runs.set_index("run_id")["seed"][run]): _exactly(math.log10(value))
                for run, value in ratios.items()
                if value > 0 and math.isfinite(value)
            },
            "sensitivity": {seed: _exactly(value) for seed, value in mistuned.by_seed.items()},
        },
    )


def room(found: Window) -> Bounds:
    """Return bounds, in decades, from a window's best rate to its upper edge."""
    return math.log10(found.high.lr / found.best_lr), math.log10(found.high.furthest_lr / found.best_lr)


def _exactly(value: float) -> Bounds:
    return value, value


def edges_of(study: Study) -> dict[str, Any]:
    """Return each series' row from `lr=edge`; {} without a search."""
    if "edges" not in study.searches:
        return {}
    series = dict(zip(study.runs["run_id"], study.runs["series"], strict=True))
    return {series[row.run_id]: row for row in study.searches["edges"].itertuples() if row.run_id in series}


def _edge_bounds(row: Any) -> Bounds:
    """Return bounds in decades from the best rate to `lr=edge`'s edge by verdict."""
    if not (math.isfinite(row.best_lr) and math.isfinite(row.verdict_lr)):
        return math.nan, math.nan
    most = math.log10(row.verdict_next_lr / row.best_lr) if math.isfinite(row.verdict_next_lr) else math.inf
    return math.log10(row.verdict_lr / row.best_lr), most


def _stable_bounds(runs: Frame, best_lr: float) -> Bounds:
    """Return bounds in decades from a grid's best rate to its largest stable rate.

    Stable means a stable verdict in every seed. The upper bound is the next rate, or ∞ if none.
    """
    stable = [float(lr) for lr, part in runs.groupby("lr") if set(part["status"]) == {"stable"}]
    if not stable or not math.isfinite(best_lr):
        return math.nan, math.nan
    above = [float(lr) for lr in set(runs["lr"]) if lr > max(stable)]
    return math.log10(max(stable) / best_lr), math.log10(min(above) / best_lr) if above else math.inf
