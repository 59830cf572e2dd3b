"""Predict each curve's best learning rate and edge from step k.

A curve is all rates of one series and seed; each has one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.numbers.early import BEFORE, DURING, NO_RESULT, early_runs, largest_first
from analysis.numbers.kinds import edges_of
from analysis.numbers.windows import windows
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study

DECADE = 10.0


def join_early_curves(studies: Sequence[Study]) -> Frame:
    """Return `early_curves` for several studies, without duplicates and parts of larger curves."""
    frames = [early_curves(study) for study in largest_first(studies)]
    if not frames:
        return pd.DataFrame(columns=["curve"])
    found = pd.concat(frames, ignore_index=True)
    ids = list(found["run_ids"])
    again = [any(own < other for other in ids) or own in ids[:place] for place, own in enumerate(ids)]
    return found[~np.array(again, dtype=bool)].reset_index(drop=True)


@once_per_study
def early_curves(study: Study) -> Frame:
    """Return a table with one row per curve.

    - ``study group curve stratum series mechanism seed run_ids``.
    - ``best_lr``: rate with the lowest final validation NLL. NaN if every run diverged or a run has no result.
      ``is_bound``: it is the curve's smallest or largest rate, so the best may lie beyond.
    - ``edge``: largest stable rate; ``edge_kind``: its source. `lr=edge` gives the middle of its bracket, by verdict or
      else by NLL. Without `lr=edge`, it is the upper end of the seed's stable window, or the middle of the bracket next
      to a divergence. NaN beyond the tried rates ("open", "unmeasured") or without data ("none").
    - ``alpha_max critical_lr grad_norm loss sharpness``: at the smallest rate.
    - ``alpha_cross critical_cross``: rate at which early α_max (critical LR) falls below the rate (`crossing`).
      ``…_is_bound``: there is no crossing between the smallest and largest rate, and the value is one of these.
    - ``loss_best``: rate with the lowest training loss up to step k. ``unbroken``: largest rate not broken by the
      horizon, or the smallest if all broke.
    - ``decade_below``: a tenth of the smallest rate that diverged in the end, NaN if none. This uses the outcome.
    """
    runs, found, edges = early_runs(study), windows(study), _edges_found(study)
    # Predictors use common rates only: the further rates tried by `lr=edge` depend on the others' outcomes.
    by_series = [set(rates) for _, rates in runs.groupby("series")["lr"]]
    common = set.intersection(*by_series) or set(runs["lr"])
    rows = []
    for (series, seed), own in runs.groupby(["series", "seed"], sort=False):
        window = found[series].by_seed.get(int(seed))
        own = own.sort_values("lr")
        edge, kind = edges.get(series) or _end_of(window)
        best = window.best_lr if window and not (own["fate"] == NO_RESULT).any() else math.nan
        diverged = own.loc[own["status"] == "diverged", "lr"]
        rows.append(
            own.iloc[0][["study", "group", "curve", "stratum", "series", "mechanism", "seed"]].to_dict()
            | {"run_ids": frozenset(own["run_id"]), "edge": edge, "edge_kind": kind}
            | {"best_lr": best, "is_bound": best in (own["lr"].min(), own["lr"].max())}
            | {"decade_below": float(diverged.min()) / DECADE if len(diverged) else math.nan}
            | _predictors(own[own["lr"].isin(common)])
        )
    return pd.DataFrame(rows)


def _edges_found(study: Study) -> dict[str, tuple[float, str]]:
    """Return each series' edge from `lr=edge`: the geometric middle of its bracket."""
    found = {}
    for series, row in edges_of(study).items():
        brackets = ((row.verdict_lr, row.verdict_next_lr, "by verdict"), (row.nll_lr, row.nll_next_lr, "by NLL"))
        known = [(math.sqrt(low * high), kind) for low, high, kind in brackets if low > 0 and high > 0]
        found[series] = known[0] if known else (math.nan, "open")
    return found


def _end_of(window) -> tuple[float, str]:
    """Return the upper end of a seed's window and its kind."""
    if window is None:
        return math.nan, "none"
    if window.open_high:
        return math.nan, window.high.kind
    return math.sqrt(window.high.lr * window.high.furthest_lr), window.high.kind


def _predictors(own: Frame) -> dict[str, float]:
    """Return a curve's predictors at step k, from runs sorted by rate.

    Runs that broke before measurement contribute nothing.
    """
    measured = own[own["alpha_max"].notna()]
    logged = own[own["loss"].notna()]
    first = measured.iloc[0] if len(measured) else None
    at_first = ("alpha_max", "critical_lr", "sharpness", "grad_norm", "loss")
    finite = logged[np.isfinite(logged["loss"])]
    found = {name: math.nan if first is None else float(first[name]) for name in at_first}
    for name, limit in (("alpha_cross", "alpha_max"), ("critical_cross", "critical_lr")):
        found[name], found[f"{name}_is_bound"] = crossing(measured["lr"], measured[limit])
    # the training's own prediction, without any measurement
    known = own[own["fate"] != NO_RESULT]
    whole = known.loc[~known["fate"].isin((BEFORE, DURING)), "lr"]
    found["unbroken"] = float(whole.max() if len(whole) else known["lr"].min())
    found["loss_best"] = float(finite.loc[finite["loss"].idxmin(), "lr"]) if len(finite) else math.nan
    return found


class Crossing(NamedTuple):
    """A rate at which a limit falls below the rate itself.

    ``is_bound``: there is no crossing among the measured rates, and ``lr`` is the smallest or largest.
    """

    lr: float
    is_bound: bool


def crossing(lrs: Sequence[float], limits: Sequence[float]) -> Crossing:
    """Return the first rate at which the limit falls below the rate.

    The crossing is interpolated linearly in logarithms. Without one, the result is a bound: the largest rate, or the
    smallest if the limit is already below. Such curves share a rank. NaN without measurements.

    Args:
        lrs: rising learning rates.
        limits: one limit per rate; ∞ and 0 are allowed, NaN is left out.
    """
    x, y = np.asarray(lrs, dtype=float), np.asarray(limits, dtype=float)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    if not len(x):
        return Crossing(math.nan, False)
    below = np.flatnonzero(y < x)
    if not len(below) or below[0] == 0:
        return Crossing(float(x[0] if len(below) else x[-1]), True)
    low, high = below[0] - 1, below[0]
    if np.isinf(y[low]) or y[high] == 0:
        return Crossing(float(math.sqrt(x[low] * x[high])), False)
    over, under = math.log(y[low] / x[low]), math.log(y[high] / x[high])
    share = over / (over - under)
    return Crossing(float(x[low] * (x[high] / x[low]) ** share), False)
