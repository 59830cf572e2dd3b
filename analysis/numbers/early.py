"""Collect early measurements of each run beside its later outcome, without leaking the outcome.

Step k is the step of the earliest checkpoint. α_max there is measured by the protocol's own optimizer steps
(`warmup_steps` and `recorded_steps`), on batches never drawn in training. The measurement thus covers training up to k
plus these steps, called the horizon. Only events after the horizon are judged; earlier breaks are counted separately.
Losses and gradient norms are read up to k, and again between k and the horizon: cheaper than α_max, with an equally
late end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis.numbers.kinds import OWN_STATE
from analysis.numbers.step_shares import EARLIEST, finite_median, recorded_steps
from analysis.study.load import ENDED, Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import lr_text

DIVERGED, SPIKED, PLATEAUED = "diverged", "spiked", "plateaued"
# defaults in `stability.config.training.VerdictSpec`
VERDICT = {"smoothing_steps": 20, "spike_nats": 0.5, "noise_margin": 8.0}
SPIKE_TOP = re.compile(r"by step (\d+)")


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
    settings = VERDICT | (study.spec.get("verdict") or {})
    broke = runs["status"].isin((DIVERGED, SPIKED))
    plateaued = runs.index[runs["status"] == PLATEAUED]
    rises = _rises(study.curves, [*runs.index[broke], *plateaued], settings)
    broke |= runs.index.isin(rises.index[rises["is_spike"] & rises.index.isin(plateaued)])
    broke |= (runs["status"] == PLATEAUED) & (runs["val_nll"] > runs["init_nll"] + settings["spike_nats"])
    tops = runs["reason"].str.extract(SPIKE_TOP, expand=False).astype(float).where(runs["status"] == SPIKED)
    ends = runs["num_steps"].where(runs["status"] == DIVERGED)
    onset = pd.concat([rises["onset"].reindex(runs.index), tops, ends], axis=1).min(axis=1)
    return pd.DataFrame({"broke": broke, "onset": onset.where(broke)})


def _rises(curves: Frame, runs: list[str], settings: dict[str, float]) -> Frame:
    """Return ``onset`` (NaN without a rise) and ``is_spike`` (`_is_spike`) by run."""
    rows = curves[curves["run_id"].isin(runs) & (curves["step"] > 0)].sort_values("step")
    found = {}
    for run, own in rows.groupby("run_id"):
        loss = own["loss"]
        smoothed = loss.ewm(alpha=1 / settings["smoothing_steps"], adjust=False).mean()
        rise = smoothed - smoothed.cummin()
        risen = own.loc[rise > settings["spike_nats"], "step"]
        found[run] = {
            "onset": float(risen.min()) if len(risen) else np.nan,
            "is_spike": _is_spike(loss, smoothed, rise, settings),
        }
    return pd.DataFrame.from_dict(found, orient="index", columns=["onset", "is_spike"]).astype(
        {"onset": float, "is_spike": bool}
    )


def _is_spike(loss: Column, smoothed: Column, rise: Column, settings: dict[str, float]) -> bool:
    """Return whether a loss rose above its minimum by ``spike_nats`` and by ``noise_margin`` σ.

    σ is the noise of the smoothed loss at its minimum (at step ``smoothing_steps``, if the minimum is earlier), as in
    `stability.training.verdict.SpikeWatch`.
    """
    share, place = 1 / settings["smoothing_steps"], np.arange(len(loss))
    # The losses' variance is a sixth of their mean squared second difference, over about ten times the smoothing.
    variance = (loss.diff().diff() ** 2 / 6).ewm(alpha=share / 10).mean().fillna(0.0)
    # An exponential mean that starts at its first value has the full variance at first and ρ/(2 − ρ) in the end.
    at_first = (1 - share) ** (2 * place)
    kept = at_first + (1 - at_first) * share / (2 - share)
    is_lowest = smoothed == smoothed.cummin()
    seen = variance.where(is_lowest | (place < settings["smoothing_steps"])).ffill()
    noise = np.sqrt(seen * pd.Series(kept, loss.index).where(is_lowest).ffill())
    return bool((rise > np.maximum(settings["spike_nats"], settings["noise_margin"] * noise)).any())


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


@once_per_study
def early_runs(study: Study) -> Frame:
    """Return a table with one row per run.

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
    return frame.reset_index(drop=True)


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
    by_run = asked.groupby("run_id")[name]
    infinite = by_run.apply(lambda values: np.isposinf(values).any() and not np.isfinite(values).any())
    return by_run.apply(finite_median).fillna(infinite.map({True: np.inf, False: 0.0}))


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
