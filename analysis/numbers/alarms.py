"""Find which signal gives alarm before a training run breaks, how long before, and how often without reason.

The rule is the same for every signal and run. A signal gives alarm where it rises above the median of its own
last rows by `MADS` scaled median absolute deviations, is not finite, or passes its named limit. Only the first row
of consecutive ones counts. A run breaks at its onset (`early.breaks`): where the smoothed loss exceeded its minimum by
a spike's height.

- Warned: share of broken runs with an alarm within `HORIZON` steps before the onset, mean over groups of runs with
  one mechanism, settings and seed. Runs without more than `FEWEST_ROWS` rows before it are left out.
- Lead: steps from the first of these alarms to the onset.
- False alarms: per 1,000 steps of runs that did not break.
- By chance: share of broken runs that false alarms of that number would warn of, 1 − exp(−number · `HORIZON` / 1,000).
- Earned lead: the lead, 0 without an alarm in time, less the mean one of false alarms at that rate. With λ alarms per
  step, the first of them within H steps precedes the onset by H − (1 − e^(−λH))/λ on average, 0 without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import betaincinv

from analysis.numbers.early import breaks
from analysis.numbers.ranking import TAILS, Draws, Estimate
from analysis.study.load import FINISHED, Column, Frame, Study
from analysis.study.once import once_per_study

MADS = 3.0
MAD_OF_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
ROWS, FEWEST_ROWS = 50, 10  # a signal's own last rows, and the fewest that have a median
HORIZON = 50  # steps before the onset


@dataclass(frozen=True)
class Signal:
    """A quantity logged while a run trains.

    Of several blocks in a step, the nearest to an alarm counts.

    Attributes:
        name: in tables.
        log: name in `Study.signals`; "" for `Study.curves`.
        column: its column there.
        sign: −1 if low values give alarm.
        limit: alarm beyond it at once; None without a named limit.
        over: column that it is divided by; "" for none.
    """

    name: str
    log: str
    column: str
    sign: int = 1
    limit: float | None = None
    over: str = ""

    @property
    def signed_limit(self) -> float | None:
        """The limit of `list_rows`' values."""
        return None if self.limit is None else self.sign * self.limit


LOSS = Signal("training loss", "", "loss")
LOGITS = Signal("largest attention logit", "activations", "attention_logit_max", limit=50.0)
SIGNALS = (
    LOSS,
    Signal("gradient norm", "", "grad_norm"),
    Signal("update norm", "", "update_norm"),
    LOGITS,
    Signal("lowest attention entropy", "activations", "attention_entropy_min", sign=-1),
    Signal("mean log Z", "activations", "log_z", limit=20.0),
    Signal("largest logit", "activations", "logit_max"),
    Signal("busiest expert’s load", "activations", "expert_load_max"),
    Signal("router’s lowest entropy", "activations", "router_entropy", sign=-1),
    Signal("stream’s RMS", "activations", "stream_rms"),
    Signal("RMS of g/√v̂", "activations", "rms_t", limit=2.3),
    Signal("α_max / α", "edge", "alpha_max", sign=-1, limit=1.0, over="alpha"),
    Signal("Adam’s sharpness over its threshold", "edge", "adam_ratio", limit=1.0),
)


def list_rows(study: Study, signal: Signal) -> Frame:
    """Return a signal's ``run_id``, ``step`` and ``value``, times its sign, so that high values give alarm.

    Without rows where the study did not log it.
    """
    logged = study.signals.get(signal.log) if signal.log else study.curves
    if logged is None or signal.column not in logged:
        return pd.DataFrame(columns=["run_id", "step", "value"])
    rows = logged[logged[signal.column].notna() & (logged["step"] > 0)]
    values = rows[signal.column] / rows[signal.over] if signal.over else rows[signal.column]
    named = rows[["run_id", "step"]].assign(value=signal.sign * values)
    return named.groupby(["run_id", "step"], as_index=False)["value"].max()


@dataclass(frozen=True)
class Warned:
    """How well one signal warns.

    Attributes:
        signal: the signal.
        broken: broken runs with enough rows of it.
        warned: share of them with an alarm in time; Clopper and Pearson's interval, with units as trials.
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


@dataclass(frozen=True)
class EarnedLeads:
    """A signal's earned leads less those of the training loss.

    Attributes:
        signal: the signal.
        by_unit: mean over a unit's broken runs with enough rows of both, in steps; a unit is a group of runs with one
            mechanism, settings and seed.
        runs: number of those runs.
        why_not: reason without numbers; "" with them.
    """

    signal: Signal
    by_unit: tuple[float, ...] = ()
    runs: int = 0
    why_not: str = ""


def find_alarms(values: Sequence[float], limit: float | None = None) -> np.ndarray:
    """Return the rows at which a signal begins to give alarm, as a mask.

    Args:
        values: the signal, row by row; NaN and ∞ give alarm.
        limit: alarm above it at once; None without one.
    """
    x = np.asarray(values, dtype=float)
    alarm = np.isnan(x) | np.isposinf(x)  # −∞ is far from an alarm: an α_max without limit
    if limit is not None:
        alarm |= x > limit
    for place in range(FEWEST_ROWS, len(x)):
        seen = x[max(0, place - ROWS) : place]
        seen = seen[np.isfinite(seen)]
        if len(seen) >= FEWEST_ROWS:
            middle = float(np.median(seen))
            alarm[place] |= x[place] > middle + MADS * MAD_OF_NORMAL * float(np.median(np.abs(seen - middle)))
    return alarm & ~np.concatenate([[False], alarm[:-1]])


def find_warnings(study: Study, signal: Signal) -> Frame:
    """Return one row per run that has the signal: ``broke``, ``onset``, ``lead``, ``alarms``, ``steps``, ``unit``.

    - ``lead``: steps from the first alarm within `HORIZON` before the onset; NaN without one.
    - ``alarms``, ``steps``: of runs that did not break.
    - ``unit``: mechanism, other settings and seed, which the runs of all rates share.

    Args:
        study: the study.
        signal: the signal.
    """
    known, found = breaks(study), []
    runs = study.runs[study.runs["status"].isin((*FINISHED, "diverged"))].set_index("run_id")
    of_run = dict(tuple(list_rows(study, signal).groupby("run_id")))
    for run in runs.index.intersection(list(of_run)):
        own = of_run[run].sort_values("step")
        steps = own["step"].to_numpy(dtype=float)
        at = steps[find_alarms(own["value"].to_numpy(), signal.signed_limit)]
        broke, onset = bool(known.loc[run, "broke"]), float(known.loc[run, "onset"])
        if broke and not (steps < onset).sum() > FEWEST_ROWS:
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


@once_per_study
def compare_leads(study: Study) -> list[EarnedLeads]:
    """Return each logged signal's earned leads beside those of the training loss."""
    loss = find_warnings(study, LOSS)
    return [
        _compare(signal, found, loss)
        for signal in SIGNALS
        if signal != LOSS and len(found := find_warnings(study, signal))
    ]


def _compare(signal: Signal, frame: Frame, loss: Frame) -> EarnedLeads:
    broken = frame.index[frame["broke"]].intersection(loss.index[loss["broke"]])
    if broken.empty:
        return EarnedLeads(signal, why_not=f"no run broke with more than {FEWEST_ROWS} rows before")
    if frame["broke"].all() or loss["broke"].all():
        return EarnedLeads(signal, why_not="every run broke, and false alarms are counted on others")
    earned = _earned_leads(frame).loc[broken] - _earned_leads(loss).loc[broken]
    by_unit = earned.groupby(frame.loc[broken, "unit"]).mean()
    return EarnedLeads(signal, tuple(by_unit.tolist()), len(broken))


def _earned_leads(frame: Frame) -> Column:
    """Return each broken run's lead, 0 without one, less the mean lead of false alarms."""
    rate = _rate(frame[~frame["broke"]]).value / 1000
    by_chance = HORIZON + math.expm1(-rate * HORIZON) / rate if rate else 0.0
    return frame.loc[frame["broke"], "lead"].fillna(0.0) - by_chance


def judge_signals(studies: Iterable[Study]) -> list[Warned]:
    """Return how well each logged signal warns, over the runs of several studies, each run once."""
    several = sorted(studies, key=lambda study: (-len(study.runs), study.name))  # shared runs go with the larger one
    by_signal = {}
    for signal in SIGNALS:
        joined = pd.concat([find_warnings(study, signal) for study in several])
        if len(joined):
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
        _share((~np.isnan(lead)).astype(float), draws.codes),
        _median(lead, draws),
        _median(lead - others, draws),
        false,
        1 - math.exp(-false.value * HORIZON / 1000) if not math.isnan(false.value) else math.nan,
        len(sound),
    )


def _share(values: np.ndarray, codes: np.ndarray) -> Estimate:
    """Return the mean over units of their runs' mean, and Clopper and Pearson's 95 % interval with units as trials."""
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, np.empty(0))
    of_units = np.bincount(codes, weights=values) / np.bincount(codes)
    number, hits = len(of_units), float(of_units.sum())
    low = float(betaincinv(hits, number - hits + 1, TAILS[0])) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, number - hits, TAILS[1])) if hits < number else 1.0
    return Estimate(hits / number, low, high, np.empty(0))


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
