"""Find which signal gives alarm before a training run breaks, how long before, and how often without reason.

The rule is the same for every signal and run. A signal is in alarm where it is above the median of its own last rows
by `MADS` scaled median absolute deviations, is not finite, or is beyond its named limit. A run breaks at its onset
(`early_measurements.breaks`): where the smoothed loss exceeded its minimum by a spike's height.

- Warned: share of broken runs with a row in alarm within `HORIZON` steps before the onset, mean over groups of runs
  with one mechanism, settings and seed. Runs without more than `FEWEST_ROWS` rows before it are left out.
- Lead: steps from the first of these rows to the onset.
- False alarms: beginnings of an alarm, per 1,000 steps of comparable runs (`find_comparable`): those that did not break
  at the rates of broken ones. Signals of large rates differ from those of small ones, also without a break.
- By chance: what steps of comparable runs would have as onsets, each with more than `FEWEST_ROWS` rows before. A
  signal that is always in alarm warns of every break, and by chance as well.
- Earned lead: the lead, 0 without an alarm in time, less the mean one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import betaincinv, gammaincinv

from analysis.numbers.early_measurements import breaks
from analysis.numbers.ranking import TAILS, Draws, Estimate
from analysis.study.load import ENDED, Column, Frame, Study
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


@once_per_study
def list_rows(study: Study, signal: Signal) -> Frame:
    """Return a signal's ``run_id``, ``step`` and ``value``, times its sign, so that high values give alarm.

    A number that was not finite is null in the logs, and ∞ here; α_max is −∞ where the curvature allows any step.
    Without rows where the study did not log it.
    """
    logged = study.signals.get(signal.log) if signal.log else study.curves
    if logged is None or signal.column not in logged:
        return pd.DataFrame(columns=["run_id", "step", "value"])
    rows = logged[logged["step"] > 0]
    keys = [name for name in ("run_id", "block") if name in rows]
    rows = rows[rows[signal.column].notna().groupby([rows[name] for name in keys]).transform("any")]
    values = signal.sign * (rows[signal.column] / rows[signal.over] if signal.over else rows[signal.column])
    lost = rows[signal.column].isna()
    if signal.column == "alpha_max" and "curvature" in rows:
        values = values.mask(lost & (rows["curvature"] <= 0), -math.inf)  # no step is too long there
    named = rows[["run_id", "step"]].assign(value=values.fillna(math.inf))
    return named.groupby(["run_id", "step"], as_index=False)["value"].max()


@dataclass(frozen=True)
class Warned:
    """How well one signal warns.

    Attributes:
        signal: the signal.
        broken: broken runs with enough rows of it.
        warned: share of them in alarm in time; Clopper and Pearson's interval, with units as trials.
        lead: median steps from the first row in alarm in time to the onset.
        beyond_loss: median lead less the loss's, over runs of which both warned.
        false: alarms per 1,000 steps of comparable runs.
        chance: share of their steps before which it was in alarm in time.
        runs: comparable runs.
    """

    signal: Signal
    broken: int
    warned: Estimate
    lead: Estimate
    beyond_loss: Estimate
    false: Estimate
    chance: Estimate
    runs: int


@dataclass(frozen=True)
class EarnedLeads:
    """A signal's leads less those of the training loss, before breaks and by chance.

    Attributes:
        signal: the signal.
        by_unit: mean over a unit's broken runs with enough rows of both, in steps, 0 for a lead without an alarm in
            time; a unit is a group of runs with one mechanism, settings and seed.
        by_chance: mean over the steps of a unit's comparable runs.
        runs: number of the broken runs.
        warned: how many of them the signal warned of.
        loss_warned: how many the training loss warned of.
        why_not: reason without numbers; "" with them.
    """

    signal: Signal
    by_unit: tuple[float, ...] = ()
    by_chance: tuple[float, ...] = ()
    runs: int = 0
    warned: int = 0
    loss_warned: int = 0
    why_not: str = ""


def find_alarms(values: Sequence[float], limit: float | None = None) -> np.ndarray:
    """Return the rows in which a signal is in alarm, as a mask.

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
    return alarm


def find_beginnings(alarm: np.ndarray) -> np.ndarray:
    """Return the first of consecutive rows in alarm, as a mask."""
    return alarm & ~np.concatenate([[False], alarm[:-1]])


def find_leads(alarms: np.ndarray, onsets: np.ndarray) -> np.ndarray:
    """Return steps from the first row in alarm within `HORIZON` before each onset to it; 0 without one.

    Args:
        alarms: ascending steps of the rows in alarm.
        onsets: steps.
    """
    first = np.append(alarms, math.inf)[np.searchsorted(alarms, onsets - HORIZON)]
    return np.where(first < onsets, onsets - first, 0.0)


@once_per_study
def find_comparable(study: Study) -> pd.Index:
    """Return the runs that did not break, of each series with broken ones, at the rates of those.

    These are the rates from the lowest on at which a run broke; if none held there, the largest at which one did.
    """
    known = breaks(study)
    runs = study.runs[study.runs["status"].isin(ENDED)].set_index("run_id")
    broke = known["broke"].reindex(runs.index)
    found = []
    for _, own in runs.groupby("series", sort=False):
        sound, broken = own[~broke[own.index]], own[broke[own.index]]
        if len(broken) and len(sound):
            found.append(sound[sound["lr"] >= min(broken["lr"].min(), sound["lr"].max())].index)
    return found[0].append(found[1:]) if found else runs.index[:0]


@once_per_study
def find_warnings(study: Study, signal: Signal) -> Frame:
    """Return one row per broken or comparable run that has the signal, with these columns.

    - ``broke``, ``onset``, ``unit``: mechanism, other settings and seed, which the runs of all rates share.
    - ``lead``: steps from the first row in alarm within `HORIZON` before the onset; NaN without one.
    - ``alarms``: of a comparable run, beginnings of an alarm; ``steps``: those with more than `FEWEST_ROWS` rows
      before; ``chance_warned``, ``chance_lead``: sums over these steps, as onsets.
    """
    known, comparable, found = breaks(study), set(find_comparable(study)), []
    runs = study.runs[study.runs["status"].isin(ENDED)].set_index("run_id")
    of_run = dict(tuple(list_rows(study, signal).groupby("run_id")))
    for run in runs.index.intersection(list(of_run)):
        broke, onset = bool(known.loc[run, "broke"]), float(known.loc[run, "onset"])
        if not broke and run not in comparable:
            continue
        own = of_run[run].sort_values("step")
        steps = own["step"].to_numpy(dtype=float)
        alarm = find_alarms(own["value"].to_numpy(), signal.signed_limit)
        row = {"run_id": run, "broke": broke, "onset": onset}
        if broke:
            if not (steps < onset).sum() > FEWEST_ROWS:
                continue
            row["lead"] = float(find_leads(steps[alarm], np.array([onset]))[0]) or math.nan
        elif len(steps) > FEWEST_ROWS:
            begins = find_beginnings(alarm[FEWEST_ROWS:])
            leads = find_leads(steps[alarm], np.arange(steps[FEWEST_ROWS] + 1, steps[-1] + 2))
            row |= {"alarms": float(begins.sum()), "steps": float(len(leads))}
            row |= {"chance_warned": float((leads > 0).sum()), "chance_lead": float(leads.sum())}
        else:
            continue
        found.append(row | {"unit": f"{runs.loc[run, 'series']} seed {runs.loc[run, 'seed']:g}"})
    columns = ["run_id", "broke", "onset", "lead", "alarms", "steps", "chance_warned", "chance_lead", "unit"]
    return pd.DataFrame(found, columns=columns).set_index("run_id").astype({"broke": bool})


@once_per_study
def compare_leads(study: Study) -> list[EarnedLeads]:
    """Return each logged signal's earned leads beside those of the training loss."""
    loss = find_warnings(study, LOSS)
    return [
        _compare(signal, find_warnings(study, signal), loss)
        for signal in SIGNALS
        if signal != LOSS and len(list_rows(study, signal))
    ]


def _compare(signal: Signal, frame: Frame, loss: Frame) -> EarnedLeads:
    broken = frame.index[frame["broke"]].intersection(loss.index[loss["broke"]])
    sound = frame.index[~frame["broke"]].intersection(loss.index[~loss["broke"]])
    if broken.empty:
        return EarnedLeads(signal, why_not=f"no run broke with more than {FEWEST_ROWS} rows before")
    if frame.loc[sound, "unit"].nunique() < 2:
        return EarnedLeads(signal, why_not="chance is judged by runs that held at such rates, of two groups or more")
    leads = (each.loc[broken, "lead"].fillna(0.0) for each in (frame, loss))
    by_chance = (each.loc[sound, "chance_lead"] / each.loc[sound, "steps"] for each in (frame, loss))
    warned, loss_warned = (int(each.loc[broken, "lead"].notna().sum()) for each in (frame, loss))
    return EarnedLeads(
        signal,
        _by_unit(next(leads) - next(leads), frame),
        _by_unit(next(by_chance) - next(by_chance), frame),
        len(broken),
        warned,
        loss_warned,
    )


def _by_unit(values: Column, frame: Frame) -> tuple[float, ...]:
    return tuple(values.groupby(frame.loc[values.index, "unit"]).mean().tolist())


def judge_signals(studies: Iterable[Study]) -> list[Warned]:
    """Return how well each logged signal warns, over the runs of several studies, each run once."""
    several = sorted(studies, key=lambda study: (-len(study.runs), study.name))  # shared runs go with the larger one
    by_signal = {}
    for signal in SIGNALS:
        frames = [find_warnings(study, signal) for study in several if len(list_rows(study, signal))]
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
    return Warned(
        signal,
        len(broken),
        _share((~np.isnan(lead)).astype(float), draws.codes),
        _median(lead, draws),
        _median(lead - others, draws),
        _rate(sound),
        _chance(sound),
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
    """Return the alarms per 1,000 steps over all runs; its interval is at least that of independent alarms."""
    number, per = float(sound["alarms"].sum()), 1000 / float(sound["steps"].sum() or math.nan)
    low = float(gammaincinv(number, TAILS[0])) if number else 0.0
    return _ratio(sound, "alarms", 1000, (low * per, float(gammaincinv(number + 1, TAILS[1])) * per))


def _chance(sound: Frame) -> Estimate:
    """Return the share of steps with an alarm in time; its interval is at least that of windows side by side."""
    hits, windows = float(sound["chance_warned"].sum()) / HORIZON, float(sound["steps"].sum()) / HORIZON
    low = float(betaincinv(hits, windows - hits + 1, TAILS[0])) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, windows - hits, TAILS[1])) if hits < windows else 1.0
    return _ratio(sound, "chance_warned", 1, (low, high))


def _ratio(sound: Frame, column: str, factor: float, least: tuple[float, float]) -> Estimate:
    """Return a column's sum per step over all runs."""
    if sound.empty:
        return Estimate(math.nan, math.nan, math.nan, np.empty(0))
    draws = Draws(sound["unit"].tolist())
    weights = draws.counts()[:, draws.codes]
    values, steps = factor * sound[column].to_numpy(dtype=float), sound["steps"].to_numpy(dtype=float)
    found = Estimate.of(float(values.sum() / steps.sum()), (weights @ values) / (weights @ steps))
    low, high = float(np.fmin(found.low, least[0])), float(np.fmax(found.high, least[1]))
    return Estimate(found.value, low, high, found.draws)
