"""Say which runs broke, and from which step on, by their logged losses and not by their last word alone: a run that
exploded and learned nothing in the end is called plateaued."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from analysis.study.load import Column, Frame, Study

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
    asked = VERDICT | ((study.study.get("spec") or {}).get("verdict") or {})
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
