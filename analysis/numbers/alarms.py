"""Find which signal gives alarm before a training run breaks, how long before, and how often without reason.

The rule is fixed beforehand and the same for every run. A signal gives alarm where it rises above the median of its own
last rows by `MADS` scaled median absolute deviations, is not finite, or passes its named limit. Only the first row
of consecutive ones counts. A run breaks at its onset (`early.breaks`): where the smoothed loss exceeded its minimum by
a spike's height.

- Warned: share of broken runs with an alarm within `HORIZON` steps before the onset.
- Lead: steps from the first of these alarms to the onset.
- False alarms: per 1,000 steps of runs that did not break.
- By chance: share of broken runs that false alarms of that number would warn of, 1 − exp(−number · `HORIZON` / 1,000).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.numbers.early import breaks
from analysis.numbers.ranking import Draws, Estimate
from analysis.study.load import FINISHED, Frame, Study

MADS = 3.0
MAD_OF_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
ROWS, FEWEST_ROWS = 50, 10  # a signal's own last rows, and the fewest that have a median
HORIZON = 100  # steps before the onset


@dataclass(frozen=True)
class Signal:
    """A quantity logged while a run trains.

    Attributes:
        name: in tables.
        log: file of the run's folder: "metrics", or an optional one.
        column: its column there.
        limit: alarm above it; ∞ without a named limit.
        needs: words that log it; "" if every run does.
    """

    name: str
    log: str
    column: str
    limit: float = math.inf
    needs: str = ""


LOSS = Signal("training loss", "metrics", "loss")
SIGNALS = (
    LOSS,
    Signal("gradient norm", "metrics", "grad_norm"),
    Signal("update norm", "metrics", "update_norm"),
)


@dataclass(frozen=True)
class Warned:
    """How well one signal warns.

    Attributes:
        signal: the signal.
        broken: broken runs with rows of it.
        warned: share of them with an alarm in time.
        lead: median steps from the first alarm in time to the onset.
        beyond_loss: median lead less the loss's, over runs of which both warned.
        false: alarms per 1,000 steps of runs that did not break.
        chance: share that false alarms of that number would warn of.
        runs: runs that did not break.
    """

    signal: Signal
    broken: int
    warned: Estimate
    lead: Estimate
    beyond_loss: Estimate
    false: Estimate
    chance: float
    runs: int


def find_alarms(values: Sequence[float], limit: float = math.inf) -> np.ndarray:
    """Return the rows at which a signal begins to give alarm, as a mask.

    Args:
        values: the signal, row by row; NaN and ±∞ give alarm.
        limit: alarm above it.
    """
    x = np.asarray(values, dtype=float)
    alarm = ~np.isfinite(x) | (x > limit)
    for place in range(FEWEST_ROWS, len(x)):
        seen = x[max(0, place - ROWS) : place]
        seen = seen[np.isfinite(seen)]
        if len(seen) >= FEWEST_ROWS:
            middle = float(np.median(seen))
            alarm[place] |= x[place] > middle + MADS * MAD_OF_NORMAL * float(np.median(np.abs(seen - middle)))
    return alarm & ~np.concatenate([[False], alarm[:-1]])


def find_warnings(study: Study, rows: Frame, signal: Signal) -> Frame:
    """Return one row per run that has the signal: ``broke``, ``onset``, ``lead``, ``alarms``, ``steps``, ``unit``.

    - ``lead``: steps from the first alarm within `HORIZON` before the onset; NaN without one.
    - ``alarms``, ``steps``: of runs that did not break.
    - ``unit``: mechanism, other settings and seed, which the runs of all rates share.

    Args:
        study: the study.
        rows: ``run_id``, ``step`` and the signal's column.
        signal: the signal.
    """
    known, found = breaks(study), []
    runs = study.runs[study.runs["status"].isin((*FINISHED, "diverged"))].set_index("run_id")
    of_run = dict(tuple(rows[rows[signal.column].notna() & (rows["step"] > 0)].groupby("run_id")))
    for run in runs.index.intersection(list(of_run)):
        own = of_run[run].sort_values("step")
        steps = own["step"].to_numpy(dtype=float)
        at = steps[find_alarms(own[signal.column].to_numpy(), signal.limit)]
        broke, onset = bool(known.loc[run, "broke"]), float(known.loc[run, "onset"])
        if broke and math.isnan(onset):
            continue
        in_time = at[(at < onset) & (at >= onset - HORIZON)] if broke else at[:0]
        found.append({
            "run_id": run,
            "broke": broke,
            "onset": onset,
            "lead": onset - in_time[0] if len(in_time) else math.nan,
            "alarms": math.nan if broke else float(len(at)),
            "steps": math.nan if broke else steps[-1],
            "unit": f"{runs.loc[run, 'series']} seed {runs.loc[run, 'seed']:g}",
        })  # fmt: skip
    columns = ["run_id", "broke", "onset", "lead", "alarms", "steps", "unit"]
    return pd.DataFrame(found, columns=columns).set_index("run_id")


def judge_signals(studies: Iterable[Study], read: Callable[[Study, Signal], Frame]) -> list[Warned]:
    """Return how well each signal warns, over the runs of several studies, each run once.

    Args:
        studies: the studies.
        read: returns a signal's rows of a study; empty if it was not logged.
    """
    several = sorted(studies, key=lambda study: (-len(study.runs), study.name))  # shared runs go with the larger one
    by_signal = {}
    for signal in SIGNALS:
        frames = [find_warnings(study, rows, signal) for study in several if len(rows := read(study, signal))]
        if frames:
            joined = pd.concat(frames)
            by_signal[signal] = joined[~joined.index.duplicated()]
    loss = by_signal.get(LOSS)
    return [_judge(signal, frame, loss) for signal, frame in by_signal.items()]


def _judge(signal: Signal, frame: Frame, loss: Frame | None) -> Warned:
    broken, sound = frame[frame["broke"]], frame[~frame["broke"]]
    draws = Draws(broken["unit"].tolist())
    lead = broken["lead"].to_numpy(dtype=float)
    others = np.full(len(lead), np.nan) if loss is None else loss["lead"].reindex(broken.index).to_numpy(dtype=float)
    false = _rate(sound)
    return Warned(
        signal,
        len(broken),
        _mean((~np.isnan(lead)).astype(float), draws),
        _median(lead, draws),
        _median(lead - others, draws),
        false,
        1 - math.exp(-false.value * HORIZON / 1000) if not math.isnan(false.value) else math.nan,
        len(sound),
    )


def _mean(values: np.ndarray, draws: Draws) -> Estimate:
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, np.empty(0))
    weights = draws.counts()[:, draws.codes]
    return Estimate.of(float(values.mean()), weights @ values / weights.sum(axis=1))


def _median(values: np.ndarray, draws: Draws) -> Estimate:
    """Return the median of the values that are not NaN, with draws of whole units."""
    known = ~np.isnan(values)
    if not known.any():
        return Estimate(math.nan, math.nan, math.nan, np.empty(0))
    counts = draws.counts()[:, draws.codes].astype(int)
    drawn = [
        float(np.median(np.repeat(values[known], each[known]))) if each[known].any() else math.nan for each in counts
    ]
    return Estimate.of(float(np.median(values[known])), np.array(drawn))


def _rate(sound: Frame) -> Estimate:
    """Return the alarms per 1,000 steps over all runs, with draws of whole units."""
    if sound.empty:
        return Estimate(math.nan, math.nan, math.nan, np.empty(0))
    draws = Draws(sound["unit"].tolist())
    weights = draws.counts()[:, draws.codes]
    alarms, steps = sound["alarms"].to_numpy(dtype=float), sound["steps"].to_numpy(dtype=float)
    return Estimate.of(1000 * float(alarms.sum() / steps.sum()), 1000 * (weights @ alarms) / (weights @ steps))
