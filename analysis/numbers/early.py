"""Gather what is known of each run early in training beside what became of it later (which runs broke, and from which
step on), so that nothing of the outcome is in what is to predict it.

Step k is where the earliest checkpoint stands. α_max is measured there by optimizer steps of the protocol's own
(`warmup_steps` and `recorded_steps`, on batches that training never draws): it has looked at k + that many steps of
training, here called the horizon. So only what happens after the horizon is judged, and a run that broke before it is
counted apart, whatever it was measured as. The losses and gradient norms beside it are read up to k, and once more
between k and the horizon, which costs less than the measurement and looks as far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis.numbers.kinds import OWN_STATE
from analysis.numbers.step_shares import EARLIEST, finite_median, recorded
from analysis.study.load import FINISHED, Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import lr_text

DIVERGED, SPIKED, PLATEAUED = "diverged", "spiked", "plateaued"
# the defaults of `stability.config.training.VerdictSpec`
VERDICT = {"smoothing_steps": 20, "spike_nats": 0.5, "noise_margin": 8.0}
SPIKE_TOP = re.compile(r"by step (\d+)")


def breaks(study: Study) -> Frame:
    """Return by run ``broke`` and ``onset``.

    - ``broke``: it diverged or spiked by its verdict; or it plateaued, and either its smoothed loss rose as a spike's
      does, or its final validation NLL lies a spike's height above the initial one.
    - ``onset``: of a run that broke, the step from which on its smoothed loss stood a spike's height above its lowest
      value; no later than the top that a spike's verdict names, and than a diverged run's last step. A noisy loss takes
      more than that height to be a spike: this may be early, which leaves out runs that could have been judged, and
      lets none in that had broken. NaN: nobody can tell when.
    """
    runs = study.runs.set_index("run_id")
    asked = VERDICT | (study.spec.get("verdict") or {})
    broke = runs["status"].isin((DIVERGED, SPIKED))
    plateaued = runs.index[runs["status"] == PLATEAUED]
    rises = _rises(study.curves, [*runs.index[broke], *plateaued], asked)
    broke |= runs.index.isin(rises.index[rises["is_spike"] & rises.index.isin(plateaued)])
    broke |= (runs["status"] == PLATEAUED) & (runs["val_nll"] > runs["init_nll"] + asked["spike_nats"])
    tops = runs["reason"].str.extract(SPIKE_TOP, expand=False).astype(float).where(runs["status"] == SPIKED)
    ends = runs["num_steps"].where(runs["status"] == DIVERGED)
    onset = pd.concat([rises["onset"].reindex(runs.index), tops, ends], axis=1).min(axis=1)
    return pd.DataFrame({"broke": broke, "onset": onset.where(broke)})


def _rises(curves: Frame, runs: list[str], asked: dict[str, float]) -> Frame:
    """Return by run ``onset`` (NaN: it never rose so far) and ``is_spike`` (`_is_spike`)."""
    rows = curves[curves["run_id"].isin(runs) & (curves["step"] > 0)].sort_values("step")
    found = {}
    for run, own in rows.groupby("run_id"):
        loss = own["loss"]
        smoothed = loss.ewm(alpha=1 / asked["smoothing_steps"], adjust=False).mean()
        rise = smoothed - smoothed.cummin()
        risen = own.loc[rise > asked["spike_nats"], "step"]
        found[run] = {
            "onset": float(risen.min()) if len(risen) else np.nan,
            "is_spike": _is_spike(loss, smoothed, rise, asked),
        }
    return pd.DataFrame.from_dict(found, orient="index", columns=["onset", "is_spike"]).astype(
        {"onset": float, "is_spike": bool}
    )


def _is_spike(loss: Column, smoothed: Column, rise: Column, asked: dict[str, float]) -> bool:
    """Return whether a loss rose by more than ``spike_nats`` and ``noise_margin`` standard deviations of its smoothed
    values' own noise, taken where the lowest of them stands (in the first ``smoothing_steps``: where they end).

    The noise is that of `stability.training.verdict.SpikeWatch`: the losses' variance is a sixth of the mean square of
    their second differences, over about ten times the smoothing, of which an exponential mean that starts at its first
    value keeps all at first and ρ/(2 − ρ) in the end.
    """
    share, place = 1 / asked["smoothing_steps"], np.arange(len(loss))
    variance = (loss.diff().diff() ** 2 / 6).ewm(alpha=share / 10).mean().fillna(0.0)
    at_first = (1 - share) ** (2 * place)
    kept = at_first + (1 - at_first) * share / (2 - share)
    is_lowest = smoothed == smoothed.cummin()
    seen = variance.where(is_lowest | (place < asked["smoothing_steps"])).ffill()
    noise = np.sqrt(seen * pd.Series(kept, loss.index).where(is_lowest).ffill())
    return bool((rise > np.maximum(asked["spike_nats"], asked["noise_margin"] * noise)).any())


PAPER_STATE = "paper"
STABLE = "stable"
# What a run is worth here: judged, or why it is not.
JUDGED = "judged"
BEFORE = "broke by step k"
DURING = "broke between k and the horizon"
UNMEASURED = "no α_max at step k"
TOO_SHORT = "ended by the horizon"
NO_RESULT = "no result"
# What changes the meaning of a rate or a loss: runs that differ in one of these are not compared with each other.
STRATUM = ("optimizer", "objective", "data", "data_fingerprint", "model")
FATES = (JUDGED, BEFORE, DURING, UNMEASURED, TOO_SHORT, NO_RESULT)


def has_early(study: Study) -> bool:
    """Return whether α_max of any earliest checkpoint is among the study's results."""
    return bool((study.curvature["phase"] == EARLIEST).any()) and not study.is_search


def of_studies(studies: Iterable[Study]) -> Frame:
    """Return `early_runs` of several studies under each other, a run that two of them list once: with the larger."""
    frames = [early_runs(study) for study in largest_first(studies)]
    if not frames:
        return pd.DataFrame(columns=["run_id", "fate"])
    return pd.concat(frames, ignore_index=True).drop_duplicates("run_id").reset_index(drop=True)


def largest_first(studies: Iterable[Study]) -> list[Study]:
    """Return the studies that have early α_max by falling number of runs: what two of them share goes with the larger
    one, in whatever order they are named."""
    return sorted(filter(has_early, studies), key=lambda study: (-len(study.runs), study.name))


@once_per_study
def early_runs(study: Study) -> Frame:
    """Return a table with a row a run.

    - ``study series mechanism seed lr status``; ``group``: the series of its study; ``curve``: that and the seed;
      ``stratum``: its study, and what it has of those of `STRATUM` that vary there.
    - ``step``: k; ``horizon``: see above, that of most runs where the run has no early checkpoint.
    - ``fate``: one of `FATES`; ``broke`` and ``onset``: `breaks`; ``unstable``: it ended other than stable.
    - ``alpha_max``, ``critical_lr``: medians of the recorded steps from the run's own optimizer state,
      ``paper_alpha_max``: from the paper's (`at_step_k`); each also over the LR as ``…_ratio``; ``sharpness`` and
      ``adam_ratio`` where they were measured there. NaN: not measured.
    - ``loss grad_norm``: medians of the steps up to k, as many as α_max is a median of; ``loss_next grad_norm_next``:
      of those between k and the horizon. A value that is not finite counts as ∞; NaN: nothing was logged.
    - ``lost``: steps of the measurement whose loss was not finite; ``nonfinite``: logged steps up to the horizon with
      such a gradient norm or loss, which only guards let a run pass.
    """
    columns = ["run_id", "series", "mechanism", "seed", "lr", "status", "reason", "num_steps", "planned_steps"]
    frame = study.runs[columns].assign(study=study.name).set_index("run_id", drop=False)
    frame["stratum"] = _strata(study)
    frame["group"] = study.name + "|" + frame["series"]
    frame["curve"] = frame["group"] + "|" + frame["seed"].map("{:g}".format)
    frame = frame.join(_measured(study)).join(_spectra(study))
    for name in ("step", "horizon", "window"):
        frame[name] = frame[name].fillna(frame[name].mode().iloc[0] if frame[name].notna().any() else np.nan)
    frame = frame.join(_logged(study.curves, frame)).join(breaks(study))
    for name in ("alpha_max", "paper_alpha_max", "critical_lr"):
        frame[name.replace("critical_lr", "critical") + "_ratio"] = frame[name] / frame["lr"]
    frame["unstable"] = frame["status"] != STABLE
    frame["fate"] = _fates(frame)
    return frame.reset_index(drop=True)


def _strata(study: Study) -> list[str]:
    varying = [axis for axis in STRATUM if study.runs[axis].nunique() > 1]
    return [" ".join(map(str, (study.name, *row))) for row in study.runs[varying].itertuples(index=False)]


def _measured(study: Study) -> Frame:
    """Return by run what was measured at its earliest checkpoint, in both optimizer states."""
    own, paper = (recorded(study, EARLIEST, state) for state in (OWN_STATE, PAPER_STATE))
    rows = pd.concat([own, paper])
    by_run = rows.groupby("run_id")
    # A protocol is one text for hundreds of runs: read it once.
    taken = {text: _steps_taken(text) for text in set(rows["protocol"])}
    numbers: Column = by_run["protocol"].first().map(lambda text: taken[text])
    sizes: Column = by_run["step"].max()
    frame = pd.DataFrame({"step": by_run["checkpoint_step"].min()})
    frame["window"] = numbers.map(lambda pair: pair[1] if pair else np.nan).fillna(sizes + 1)
    frame["horizon"] = frame["step"] + numbers.map(lambda pair: sum(pair) if pair else np.nan).fillna(frame["window"])
    frame["alpha_max"] = at_step_k(own, "alpha_max")
    frame["paper_alpha_max"] = at_step_k(paper, "alpha_max")
    frame["critical_lr"] = at_step_k(own, "critical_lr")
    frame["lost"] = rows["alpha_max"].isna().groupby(rows["run_id"]).sum()
    return frame


def _steps_taken(protocol: str) -> tuple[float, float] | None:
    """Return how many optimizer steps a measurement takes before it records, and how many it records; None where a file
    is older than this."""
    known = json.loads(protocol) if protocol else {}
    if not {"warmup_steps", "recorded_steps"} <= known.keys():
        return None
    return float(known["warmup_steps"]), float(known["recorded_steps"])


def at_step_k(rows: Frame, name: str) -> Column:
    """Return by run the median of the finite values of a column, as α_max tables have it. Where none is finite: ∞ if
    every one that there is is infinite (nothing limits the step), else 0, for the loss was not finite one measured step
    on, and such a step counts as unstable everywhere. A column that was not measured of a run has no value."""
    asked = rows[rows["run_id"].isin(rows.loc[rows[name].notna(), "run_id"])] if name != "alpha_max" else rows
    if asked.empty:
        return pd.Series(dtype="float64")
    by_run = asked.groupby("run_id")[name]
    infinite = by_run.apply(lambda values: np.isposinf(values).any() and not np.isfinite(values).any())
    return by_run.apply(finite_median).fillna(infinite.map({True: np.inf, False: 0.0}))


def _spectra(study: Study) -> Frame:
    """Return by run the sharpness of its earliest checkpoint, from its own optimizer state where both were measured."""
    names = ["sharpness", "adam_ratio"]
    if "sharpness" not in study.spectra:
        return pd.DataFrame(columns=names, dtype="float64")
    rows = study.spectra["sharpness"]
    rows = rows[(rows["phase"] == EARLIEST) & (rows["state"] == OWN_STATE)]
    return rows.drop_duplicates("run_id").set_index("run_id")[names]


def _logged(curves: Frame, frame: Frame) -> Frame:
    """Return by run the medians of its logged losses and gradient norms up to k, and between k and the horizon."""
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
    """Return each run's `FATES`; the first that holds."""
    known = frame["status"].isin((*FINISHED, DIVERGED))
    # a break whose beginning nobody can tell is not known to lie after the horizon
    began = frame["onset"].fillna(0.0)
    conditions = {
        NO_RESULT: ~known | frame["step"].isna(),
        BEFORE: frame["broke"] & (began <= frame["step"]),
        DURING: frame["broke"] & (began <= frame["horizon"]),
        UNMEASURED: frame["alpha_max"].isna() & frame["paper_alpha_max"].isna(),
        TOO_SHORT: frame["num_steps"] <= frame["horizon"],
    }
    return np.select(list(conditions.values()), list(conditions), JUDGED)


def named(frame: Frame, most: int = 6) -> str:
    """Name runs by series and rate with their number: ``"sa 3e-2 (3), sc 1e-1"``, and how many kinds more."""
    counts = frame.groupby(["series", "lr"], sort=False).size()
    told = [
        f"{series} {lr_text(lr)}" + (f" ({number})" if number > 1 else "") for (series, lr), number in counts.items()
    ]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")


def fate_counts(frame: Frame) -> Mapping[str, int]:
    """Return how many runs have each of `FATES`, without those that none has."""
    counts = frame["fate"].value_counts()
    return {fate: int(counts[fate]) for fate in FATES if fate in counts}
