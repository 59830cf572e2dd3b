"""Predict from what is known at step k where a curve's best learning rate and its edge lie: of each curve, all rates of
one series and seed, a row."""

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


def of_studies(studies: Sequence[Study]) -> Frame:
    """Return `early_curves` of several studies under each other, without those that are a part of another, or the same
    as an earlier one."""
    frames = [early_curves(study) for study in largest_first(studies)]
    if not frames:
        return pd.DataFrame(columns=["curve"])
    found = pd.concat(frames, ignore_index=True)
    ids = list(found["run_ids"])
    again = [any(own < other for other in ids) or own in ids[:place] for place, own in enumerate(ids)]
    return found[~np.array(again, dtype=bool)].reset_index(drop=True)


@once_per_study
def early_curves(study: Study) -> Frame:
    """Return a table with a row a curve: ``study group curve stratum series mechanism seed run_ids``, and

    - ``best_lr``: the rate of the lowest final validation NLL; NaN where every run diverged, or a run has no result;
      ``is_bound``: that is the smallest or largest rate of the curve, and the best may lie beyond;
    - ``edge``: the largest stable rate, with ``edge_kind``: what `lr=edge` found for the series (the middle of its
      bracket by verdict; by NLL where no verdict was found), else the upper end of the seed's stable window, in the
      middle of its bracket next to a divergence. NaN where it lies beyond the rates that were tried ("open",
      "unmeasured") or nothing is known ("none");
    - ``alpha_max critical_lr``, ``grad_norm loss sharpness``: at the smallest rate;
    - ``alpha_cross critical_cross``: the rate at which the early α_max (critical LR) falls below the rate (`crossing`);
      ``…_is_bound``: it does so nowhere between the smallest and the largest rate, and the number is one of these;
    - ``loss_best``: the rate of the lowest training loss up to step k; ``unbroken``: the largest rate whose run had not
      broken by the horizon, the smallest where all had;
    - ``decade_below``: a tenth of the smallest rate that diverged in the end, NaN where none did: it is told the
      outcome.

    Only rates at which every series of the study has a run enter the predictors: which further ones `lr=edge` tries
    depends on the outcome of the others.
    """
    runs, found, edges = early_runs(study), windows(study), _edges_found(study)
    common = _common_rates(runs)
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


def _common_rates(runs: Frame) -> set[float]:
    """Return the rates that every series was run at; all where there is none."""
    by_series = [set(rates) for _, rates in runs.groupby("series")["lr"]]
    return set.intersection(*by_series) or set(runs["lr"])


def _edges_found(study: Study) -> dict[str, tuple[float, str]]:
    """Return by series the edge that `lr=edge` found: the geometric middle of the bracket that it lies in."""
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
    """Return what is known at step k of a curve's runs, by rising rate. A run that broke before it was measured has
    nothing to give."""
    measured = own[own["alpha_max"].notna()]
    logged = own[own["loss"].notna()]
    first = measured.iloc[0] if len(measured) else None
    at_first = ("alpha_max", "critical_lr", "sharpness", "grad_norm", "loss")
    finite = logged[np.isfinite(logged["loss"])]
    found = {name: math.nan if first is None else float(first[name]) for name in at_first}
    for name, limit in (("alpha_cross", "alpha_max"), ("critical_cross", "critical_lr")):
        found[name], found[f"{name}_is_bound"] = crossing(measured["lr"], measured[limit])
    found["unbroken"] = _largest_unbroken(own)
    found["loss_best"] = float(finite.loc[finite["loss"].idxmin(), "lr"]) if len(finite) else math.nan
    return found


def _largest_unbroken(own: Frame) -> float:
    """Return what the training alone tells at the horizon of where the edge lies."""
    known = own[own["fate"] != NO_RESULT]
    whole = known.loc[~known["fate"].isin((BEFORE, DURING)), "lr"]
    return float(whole.max() if len(whole) else known["lr"].min())


class Crossing(NamedTuple):
    """A rate at which a limit falls below the rate itself; ``is_bound``: it does so at none that was measured, and this
    is the smallest or the largest of them."""

    lr: float
    is_bound: bool


def crossing(lrs: Sequence[float], limits: Sequence[float]) -> Crossing:
    """Return where a limit measured at each rate falls below the rate itself, coming from the smallest one,
    interpolated linearly in logarithms. Where it never does, or already has, the largest or smallest rate: a bound, and
    such curves share a rank. NaN where nothing was measured.

    ``lrs``: rising. ``limits``: one each, ∞ and 0 allowed; rates with NaN are left out.
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
