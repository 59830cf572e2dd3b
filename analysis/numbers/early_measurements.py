"""Collect early measurements of each run beside its later outcome, without leaking the outcome.

Step k is the step of the earliest checkpoint. α_max there is measured by the protocol's own optimizer steps
(`warmup_steps` and `recorded_steps`), on batches never drawn in training. The measurement thus covers training up to k
plus these steps, called the horizon. Only events after the horizon are judged; earlier breaks are counted separately.
Losses and gradient norms are read up to k, and again between k and the horizon: cheaper than α_max, with an equally
late end. Curves (all rates of one series and seed) get one row each: best rate and edge, predicted from step k.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.numbers.at_best_rate import OWN_STATE, edges_of
from analysis.numbers.learning import unlearned_words
from analysis.numbers.step_shares import EARLIEST, recorded_steps
from analysis.numbers.windows import windows
from analysis.study.load import ENDED, Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import lr_text
from stability.runs.verdict import SpikeRule, SpikeWatch

DIVERGED, SPIKED, PLATEAUED = "diverged", "spiked", "plateaued"
SPIKE_TOP = re.compile(r"by step (\d+)")


@once_per_study
def breaks(study: Study) -> Frame:
    """Return ``broke`` and ``onset`` by run.

    - ``broke``: the verdict is diverged or spiked. A plateaued run also broke if its smoothed loss spiked, or if its
      final validation NLL exceeds the initial one by a spike's height.
    - ``onset``: first step at which a broken run's smoothed loss exceeded its minimum by a spike's height. A spiked
      run's is no later than the step in its reason, a diverged run's no later than its last step. NaN if unknown.

    A noisy loss needs more than this height for a spike, so ``onset`` may be early. An early onset excludes some valid
    runs but admits no broken one.
    """
    runs = study.runs.set_index("run_id")
    settings = SpikeRule(**(study.spec.get("verdict") or {}))
    broke = runs["status"].isin((DIVERGED, SPIKED))
    plateaued = runs.index[runs["status"] == PLATEAUED]
    rises = _rises(study.curves, [*runs.index[broke], *plateaued], settings)
    broke |= runs.index.isin(rises.index[rises["is_spike"] & rises.index.isin(plateaued)])
    broke |= (runs["status"] == PLATEAUED) & (runs["val_nll"] > runs["init_nll"] + settings.spike_nats)
    tops = runs["reason"].str.extract(SPIKE_TOP, expand=False).astype(float).where(runs["status"] == SPIKED)
    ends = runs["num_steps"].where(runs["status"] == DIVERGED)
    onset = pd.concat([rises["onset"].reindex(runs.index), tops, ends], axis=1).min(axis=1)
    return pd.DataFrame({"broke": broke, "onset": onset.where(broke)})


def _rises(curves: Frame, runs: list[str], settings: SpikeRule) -> Frame:
    """Return ``onset`` (NaN without a rise) and ``is_spike`` by run, as the training followed its loss."""
    rows = curves[curves["run_id"].isin(runs) & (curves["step"] > 0) & curves["loss"].notna()].sort_values("step")
    found = {}
    for run, own in rows.groupby("run_id"):
        watch, onset = SpikeWatch(settings), math.nan
        for step, loss in zip(own["step"].tolist(), own["loss"].tolist(), strict=True):
            watch.update(step, loss)
            if math.isnan(onset) and watch.last_rise > settings.spike_nats:
                onset = float(step)
        found[run] = {"onset": onset, "is_spike": watch.spiked}
    return pd.DataFrame.from_dict(found, orient="index", columns=["onset", "is_spike"]).astype(
        {"onset": float, "is_spike": bool}
    )


PAPER_STATE = "paper"
STABLE = "stable"
# Fates: judged, or the reason against.
JUDGED = "judged"
BEFORE = "broke by step k"
DURING = "broke between k and the horizon"
UNMEASURED = "no α_max at step k"
TOO_SHORT = "ended by the horizon"
NO_RESULT = "no result"
# These change the meaning of a rate or a loss: runs are compared only within one combination.
STRATUM = ("optimizer", "objective", "data", "data_fingerprint", "model")
FATES = (JUDGED, BEFORE, DURING, UNMEASURED, TOO_SHORT, NO_RESULT)


def has_early(study: Study) -> bool:
    """Return whether the study has α_max at an earliest checkpoint and is not a search."""
    return bool((study.curvature["phase"] == EARLIEST).any()) and not study.is_search


def join_early_runs(studies: Iterable[Study]) -> Frame:
    """Return `early_runs` for several studies; a shared run is listed once, with the larger study."""
    frames = [early_runs(study) for study in largest_first(studies)]
    if not frames:
        return pd.DataFrame(columns=["run_id", "fate"])
    return pd.concat(frames, ignore_index=True).drop_duplicates("run_id").reset_index(drop=True)


def largest_first(studies: Iterable[Study]) -> list[Study]:
    """Return the studies with early α_max, most runs first.

    Shared runs go with the larger study, whatever the order of the arguments.
    """
    return sorted(filter(has_early, studies), key=lambda study: (-len(study.runs), study.name))


def list_untrained(study: Study) -> list[str]:
    """Return the series that learned nothing or too little (`unlearned_words`); [] if all series did.

    Their runs end on either side of a threshold by noise.
    """
    found = [name for name, word in unlearned_words(study).items() if word]
    return found if len(found) < len(study.series) else []


@once_per_study
def early_runs(study: Study) -> Frame:
    """Return a table with one row per run of the series that learned (`list_untrained` has the others).

    - ``study series mechanism seed lr status``. ``group``: study and series. ``curve``: group and seed. ``stratum``:
      study and its varying axes among `STRATUM`.
    - ``step``: k. ``horizon``: see the module. Runs without an early checkpoint get the most frequent value.
    - ``fate``: one of `FATES`. ``broke`` and ``onset``: see `breaks`. ``unstable``: the verdict is not stable.
    - ``alpha_max``, ``critical_lr``: medians over recorded steps from the run's own optimizer state.
      ``paper_alpha_max``: from the paper's state (`median_at_step_k`). ``…_ratio``: each divided by the LR.
      ``sharpness`` and ``adam_ratio``: at the same checkpoint. NaN: not measured.
    - ``loss grad_norm``: medians over the last steps up to k, as many as α_max has. ``loss_next grad_norm_next``:
      medians between k and the horizon. Non-finite values count as ∞. NaN: nothing was logged.
    - ``lost``: measured steps with a non-finite loss. ``nonfinite``: logged steps up to the horizon with a non-finite
      gradient norm or loss; a run survives them only with guards.
    """
    columns = ["run_id", "series", "mechanism", "seed", "lr", "status", "reason", "num_steps", "planned_steps"]
    frame = study.runs[columns].assign(study=study.name).set_index("run_id", drop=False)
    varying = [axis for axis in STRATUM if study.runs[axis].nunique() > 1]
    frame["stratum"] = [" ".join(map(str, (study.name, *row))) for row in study.runs[varying].itertuples(index=False)]
    frame["group"] = study.name + "|" + frame["series"]
    frame["curve"] = frame["group"] + "|" + frame["seed"].map("{:g}".format)
    frame = frame.join(_read_measurements(study)).join(_spectra(study))
    for name in ("step", "horizon", "window"):
        frame[name] = frame[name].fillna(frame[name].mode().iloc[0] if frame[name].notna().any() else np.nan)
    frame = frame.join(_read_logs(study.curves, frame)).join(breaks(study))
    for name in ("alpha_max", "paper_alpha_max", "critical_lr"):
        frame[name.replace("critical_lr", "critical") + "_ratio"] = frame[name] / frame["lr"]
    frame["unstable"] = frame["status"] != STABLE
    frame["fate"] = _fates(frame)
    return frame[~frame["series"].isin(list_untrained(study))].reset_index(drop=True)


def _read_measurements(study: Study) -> Frame:
    """Return the earliest checkpoint's measurements by run, in both optimizer states."""
    own, paper = (recorded_steps(study, EARLIEST, state) for state in (OWN_STATE, PAPER_STATE))
    rows = pd.concat([own, paper])
    by_run = rows.groupby("run_id")
    # A protocol is one text for hundreds of runs: read it once.
    taken = {text: _steps_taken(text) for text in set(rows["protocol"])}
    numbers: Column = by_run["protocol"].first().map(lambda text: taken[text])
    sizes: Column = by_run["step"].max()
    frame = pd.DataFrame({"step": by_run["checkpoint_step"].min()})
    frame["window"] = numbers.map(lambda pair: pair[1] if pair else np.nan).fillna(sizes + 1)
    frame["horizon"] = frame["step"] + numbers.map(lambda pair: sum(pair) if pair else np.nan).fillna(frame["window"])
    frame["alpha_max"] = median_at_step_k(own, "alpha_max")
    frame["paper_alpha_max"] = median_at_step_k(paper, "alpha_max")
    frame["critical_lr"] = median_at_step_k(own, "critical_lr")
    frame["lost"] = rows["alpha_max"].isna().groupby(rows["run_id"]).sum()
    return frame


def _steps_taken(protocol: str) -> tuple[float, float] | None:
    """Return the protocol's warm-up and recorded steps; None for older files without them."""
    known = json.loads(protocol) if protocol else {}
    if not {"warmup_steps", "recorded_steps"} <= known.keys():
        return None
    return float(known["warmup_steps"]), float(known["recorded_steps"])


def median_at_step_k(rows: Frame, name: str) -> Column:
    """Return the median of a column's finite values by run, as in α_max tables.

    Without a finite value: ∞ if all present values are infinite (no limit on the step), else 0. The 0 stands for a
    non-finite loss one measured step later, which counts as unstable everywhere. Runs without a measured column have no
    value.
    """
    asked = rows[rows["run_id"].isin(rows.loc[rows[name].notna(), "run_id"])] if name != "alpha_max" else rows
    if asked.empty:
        return pd.Series(dtype="float64")
    values, runs = asked[name], asked["run_id"]
    medians = values.where(np.isfinite(values)).groupby(runs).median()  # as `finite_median`, for thousands of runs
    return medians.fillna(np.isposinf(values).groupby(runs).any().map({True: np.inf, False: 0.0}))


def _spectra(study: Study) -> Frame:
    """Return the earliest checkpoint's sharpness and ``adam_ratio`` by run, from its own optimizer state."""
    names = ["sharpness", "adam_ratio"]
    if "sharpness" not in study.spectra:
        return pd.DataFrame(columns=names, dtype="float64")
    rows = study.spectra["sharpness"]
    rows = rows[(rows["phase"] == EARLIEST) & (rows["state"] == OWN_STATE)]
    return rows.drop_duplicates("run_id").set_index("run_id")[names]


def _read_logs(curves: Frame, frame: Frame) -> Frame:
    """Return medians of logged losses and gradient norms by run. Up to k, and from k to the horizon."""
    rows = curves.join(frame[["step", "horizon", "window"]].rename(columns={"step": "k"}), on="run_id")
    rows = rows[(rows["step"] > 0) & (rows["step"] <= rows["horizon"])]
    found = {}
    for name in ("loss", "grad_norm"):
        rows = rows.assign(value=rows[name].where(np.isfinite(rows[name]), np.inf))
        until = (rows["step"] <= rows["k"]) & (rows["step"] > rows["k"] - rows["window"])
        found[name] = rows[until].groupby("run_id")["value"].median()
        found[f"{name}_next"] = rows[rows["step"] > rows["k"]].groupby("run_id")["value"].median()
    bad = ~(np.isfinite(rows["loss"]) & np.isfinite(rows["grad_norm"]))
    return pd.DataFrame(found | {"nonfinite": bad.groupby(rows["run_id"]).sum()})


def _fates(frame: Frame) -> np.ndarray:
    """Return each run's fate: the first that holds."""
    known = frame["status"].isin(ENDED)
    # a break of unknown onset may lie before the horizon, so it counts as early
    began = frame["onset"].fillna(0.0)
    conditions = {
        NO_RESULT: ~known | frame["step"].isna(),
        BEFORE: frame["broke"] & (began <= frame["step"]),
        DURING: frame["broke"] & (began <= frame["horizon"]),
        UNMEASURED: frame["alpha_max"].isna() & frame["paper_alpha_max"].isna(),
        TOO_SHORT: frame["num_steps"] <= frame["horizon"],
    }
    return np.select(list(conditions.values()), list(conditions), JUDGED)


def name_runs(frame: Frame, most: int = 6) -> str:
    """Name runs by series and rate with counts, e.g. ``"sa 3e-2 (3), sc 1e-1"``.

    Beyond ``most`` kinds only their number is given.
    """
    counts = frame.groupby(["series", "lr"], sort=False).size()
    told = [
        f"{series} {lr_text(lr)}" + (f" ({number})" if number > 1 else "") for (series, lr), number in counts.items()
    ]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")


def fate_counts(frame: Frame) -> Mapping[str, int]:
    """Return the number of runs for each fate that occurs."""
    counts = frame["fate"].value_counts()
    return {fate: int(counts[fate]) for fate in FATES if fate in counts}


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
