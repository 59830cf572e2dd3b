"""Compute how rounding to few bits changes the NLL, by learning rate and before and after a schedule's decay.

The runs are those of `stability.probe what=quantization`. Only runs that learned enter a comparison: a run that
diverged has no checkpoint, and one that lost half of what the best rate learned has little to lose. Logarithms need
positive changes: at bits whose rounding changes the NLL by less than its scatter, some are negative, and nothing is
compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.numbers.window_ends import shown_states
from analysis.numbers.windows import HALF, windows
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.study.reference import unlearned
from stability.runs.words import EXPLODED, LEARNED_NOTHING

NAME, LAYERS = "quantization", "quantization_layers"
TERMINAL, BEFORE = "terminal", "before_decay"
LEARNED = ("stable", "spiked")
FEWEST_RATES = 3  # of a slope


@dataclass(frozen=True)
class Compared:
    """One comparison of a series at one number of bits.

    Attributes:
        series: the series.
        bits: bits of a weight.
        by_seed: one number per seed.
        rates: learning rates behind each.
        near: the same from rates within the tolerance of the best NLL alone; () with too few.
        why_not: reason without numbers; "" with them.
    """

    series: str
    bits: int
    by_seed: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    near: tuple[float, ...] = ()
    why_not: str = ""


@once_per_study
def read_rows(study: Study, group: int = 0) -> Frame:
    """Return the rows with one scale a row (or a group of inputs), with their runs' ``status`` and ``val_nll``.

    Args:
        study: the study.
        group: inputs with one scale; 0: the row.
    """
    rows = study.probed(NAME)
    rows = rows[rows["group"] == group]
    return rows.merge(study.runs[["run_id", "status", "val_nll"]], on="run_id")


def list_bits(study: Study) -> list[int]:
    """Return the measured numbers of bits, the largest first."""
    return sorted({int(bits) for bits in study.probes[NAME]["bits"]}, reverse=True)


def count_lost(study: Study, series: str) -> dict[str, int]:
    """Return the numbers of a series' runs that diverged, exploded or learned nothing, without zeros."""
    counts = shown_states(study.of(series)).value_counts()
    return {state: int(counts[state]) for state in ("diverged", EXPLODED, LEARNED_NOTHING) if state in counts}


def compare_rates(study: Study, series: str, bits: int) -> Compared:
    """Return by seed the slope of log10 of the NLL's change against log10 of the learning rate.

    −1: a rate ten times as large has a tenth of the change. Rates at which every seed's run kept half of the learning.

    Args:
        study: the study.
        series: the series.
        bits: bits of a weight.
    """
    table = _tabulate(study, series, bits, TERMINAL)
    if (reason := _explain(table, FEWEST_RATES, study.of(series)["lr"].nunique())) or (table <= 0).any(axis=None):
        return Compared(series, bits, why_not=reason or "rounding lowers the NLL of some runs")
    near = _near_rates(study, series, table)
    return Compared(
        series,
        bits,
        tuple(_slope(table[seed]) for seed in table),
        tuple(table.index),
        tuple(_slope(table.loc[near, seed]) for seed in table) if len(near) >= FEWEST_RATES else (),
    )


def compare_decay(study: Study, series: str, bits: int) -> Compared:
    """Return by seed log10 of the NLL's change after the decay over that before, mean over learning rates.

    Args:
        study: the study.
        series: the series.
        bits: bits of a weight.
    """
    after, before = (_tabulate(study, series, bits, phase) for phase in (TERMINAL, BEFORE))
    if before.empty:
        return Compared(series, bits, why_not="no checkpoint before a decay was measured")
    common = after.index.intersection(before.index)
    after, before = after.loc[common], before.loc[common]
    swept = study.of(series)["lr"].nunique()
    reason = _explain(after, 1, swept) or _explain(before, 1, swept)
    if reason or (after <= 0).any(axis=None) or (before <= 0).any(axis=None):
        return Compared(series, bits, why_not=reason or "rounding lowers the NLL of some runs")
    ratios = np.log10(after / before)
    near = _near_rates(study, series, after)
    return Compared(
        series,
        bits,
        tuple(ratios.mean(axis=0)),
        tuple(common),
        tuple(ratios.loc[near].mean(axis=0)) if near else (),
    )


def _tabulate(study: Study, series: str, bits: int, phase: str) -> Frame:
    """Return the NLL's change by learning rate (rows) and seed, at rates where all seeds kept half of the learning."""
    rows = read_rows(study)
    rows = rows[(rows["series"] == series) & (rows["bits"] == bits) & (rows["phase"] == phase)]
    rows = rows[rows["status"].isin(LEARNED) & (rows["val_nll"] <= _learned_limit(study, series))]
    table = rows.pivot_table(index="run_lr", columns="seed", values="difference", aggfunc="first")
    return table.reindex(columns=sorted(set(study.of(series)["seed"]))).dropna()


def _learned_limit(study: Study, series: str) -> float:
    """Return the NLL at which half of what a series' best rate learned beyond the token frequencies is lost."""
    best, unigram = windows(study)[series].median, unlearned(study, series).nll
    return math.inf if best is None or not unigram > best.best_nll else best.best_nll + HALF * (unigram - best.best_nll)


def _explain(table: Frame, fewest: int, swept: int) -> str:
    """Return the reason why a table allows no comparison; "" if it does."""
    if len(table) < fewest:
        kept = f"all seeds keep half of what the best rate learned at {len(table)} of {swept} learning rates"
        return f"{kept}, and {fewest} {'is' if fewest == 1 else 'are'} needed"
    return "" if np.isfinite(table.to_numpy()).all() else "rounding makes the NLL of some runs infinite"


def _slope(values) -> float:
    """Return the least-squares slope of log10 of the values against log10 of their index."""
    x, y = np.log10(np.asarray(values.index, dtype=float)), np.log10(values.to_numpy(dtype=float))
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else math.nan


def _near_rates(study: Study, series: str, table: Frame) -> list[float]:
    """Return a table's rates whose median NLL is within the tolerance of the best."""
    best, medians = windows(study)[series].median, study.of(series).groupby("lr")["val_nll"].median()
    limit = -math.inf if best is None else best.threshold_nll
    return [lr for lr in table.index if medians.get(lr, math.inf) <= limit]
