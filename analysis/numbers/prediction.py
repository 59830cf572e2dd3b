"""Say how well each predictor of step k tells which runs will break, and where the best learning rate and the edge lie,
each beside the baselines that cost nothing to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.early import JUDGED
from analysis.numbers.ranking import FEWEST_UNITS, Draws, Estimate, auc, spearman
from analysis.study.load import Frame

POOLED, SAME_RATE = "all", "same rate"
FEWEST_GROUPS = 4  # from which on whole groups are drawn
FEWEST_CURVES = 4  # of which a rank correlation says anything


@dataclass(frozen=True)
class Predictor:
    """A column of `early_runs` or `early_curves`. ``sign``: −1 where a low value foretells a break (of curves: a low
    rate), decided before any result. ``is_rate``: it is a learning rate itself, and its distance from the truth has a
    meaning."""

    column: str
    name: str
    sign: int
    is_baseline: bool = False
    is_rate: bool = False


OF_RUNS = (
    Predictor("alpha_max", "α_max", -1),
    Predictor("alpha_max_ratio", "α_max / α", -1),
    Predictor("paper_alpha_max", "α_max, state “paper”", -1),
    Predictor("paper_alpha_max_ratio", "α_max / α, state “paper”", -1),
    Predictor("critical_lr", "critical LR", -1),
    Predictor("critical_ratio", "critical LR / α", -1),
    Predictor("sharpness", "sharpness", +1),
    Predictor("adam_ratio", "Adam's sharpness over its threshold", +1),
    Predictor("lr", "learning rate α alone", +1, is_baseline=True),
    Predictor("grad_norm", "gradient norm at step k", +1, is_baseline=True),
    Predictor("loss", "loss at step k", +1, is_baseline=True),
    Predictor("grad_norm_next", "gradient norm up to the horizon", +1, is_baseline=True),
    Predictor("loss_next", "loss up to the horizon", +1, is_baseline=True),
)
OF_CURVES = (
    Predictor("alpha_cross", "where α_max = α", +1, is_rate=True),
    Predictor("alpha_max", "α_max at the smallest rate", +1, is_rate=True),
    Predictor("critical_cross", "where critical LR = α", +1, is_rate=True),
    Predictor("critical_lr", "critical LR at the smallest rate", +1, is_rate=True),
    Predictor("sharpness", "sharpness at the smallest rate", -1),
    Predictor("grad_norm", "gradient norm at step k", -1, is_baseline=True),
    Predictor("loss", "loss at step k", -1, is_baseline=True),
    Predictor("loss_best", "rate of the lowest loss at step k", +1, is_baseline=True, is_rate=True),
    Predictor("unbroken", "largest rate unbroken at the horizon", +1, is_baseline=True, is_rate=True),
    Predictor("decade_below", "one decade below divergence", +1, is_baseline=True, is_rate=True),
)


@dataclass(frozen=True)
class Scored:
    """The scores of a predictor, by scope: each mechanism, `POOLED`, of runs also `SAME_RATE`.

    ``numbers``: by scope how many runs (curves) it is known of, of `SAME_RATE` how many pairs. ``beyond``: the pooled
    difference to each baseline by its column, on the rows that have both. ``decades``: of a rate, the median distance
    to the truth in decades.
    """

    predictor: Predictor
    scopes: Mapping[str, Estimate]
    numbers: Mapping[str, int]
    beyond: Mapping[str, Estimate]
    decades: float = np.nan


def unit_of(frame: Frame) -> str:
    """Return the column that says what is drawn: whole groups (a series of a study with all its seeds and rates) where
    there are enough of them, since seeds of a mechanism resemble each other more than mechanisms do; else curves (all
    rates of a seed, which share initialisation and the order of data), and the interval is about these groups alone."""
    return "group" if frame["group"].nunique() >= FEWEST_GROUPS else "curve"


def draws_of(frame: Frame) -> Draws:
    return Draws(list(frame[unit_of(frame)]))


def judged(runs: Frame) -> Frame:
    """Return the runs that count: measured at step k, and not broken before the horizon."""
    return runs[runs["fate"] == JUDGED].reset_index(drop=True)


def of_runs(runs: Frame, event: str) -> list[Scored]:
    """Return the areas under the ROC curves of every predictor that was measured. ``runs``: `early_runs`, of which only
    the judged ones enter; ``event``: its column ``broke`` or ``unstable``. [] where no stratum has both outcomes."""
    frame = judged(runs)
    if not _differs_within_a_stratum(frame, event):
        return []
    mechanisms = list(dict.fromkeys(frame["mechanism"]))
    return [_of_runs(frame, each, event, mechanisms) for each in OF_RUNS if frame[each.column].notna().any()]


def _of_runs(frame: Frame, predictor: Predictor, event: str, mechanisms: Sequence[str]) -> Scored:
    """Return one predictor's areas over the runs of which it is known."""
    known = frame[frame[predictor.column].notna()]
    parts = {name: known[known["mechanism"] == name] for name in mechanisms} | {POOLED: known}
    scopes = {name: _auc(part, predictor, event) for name, part in parts.items()}
    scopes[SAME_RATE] = _auc(known, predictor, event, same_rate=True)
    numbers = {name: len(part) for name, part in parts.items()} | {SAME_RATE: _pairs_at_a_rate(known, event)}
    beyond = {}
    for other in baselines(OF_RUNS):
        both = known[known[other.column].notna()]
        if len(both) and not predictor.is_baseline:
            beyond[other.column] = _auc(both, predictor, event).less(_auc(both, other, event))
    return Scored(predictor, scopes, numbers, beyond)


def _auc(part: Frame, predictor: Predictor, event: str, same_rate: bool = False) -> Estimate:
    """Return the area for some runs, over pairs within a stratum: between two, what a rate, a limit or a loss means
    differs beside what is asked. ``same_rate``: of one rate, too, so that the rate itself tells nothing."""
    strata = part["stratum"] + "|" + part["lr"].map("{:g}".format) if same_rate else part["stratum"]
    return auc(predictor.sign * part[predictor.column], part[event], draws_of(part), list(strata))


def _differs_within_a_stratum(frame: Frame, column: str) -> bool:
    return bool((frame.groupby("stratum")[column].nunique() > 1).any())


def _pairs_at_a_rate(part: Frame, event: str) -> int:
    """Return how many pairs of a run with the event and one without there are at one rate of one stratum."""
    return sum(int(own.sum()) * int((~own).sum()) for _, own in part.groupby(["stratum", "lr"])[event])


def baselines(predictors: Sequence[Predictor]) -> list[Predictor]:
    return [each for each in predictors if each.is_baseline]


def of_curves(curves: Frame, target: str) -> list[Scored]:
    """Return Spearman's rank correlations of every predictor with ``best_lr`` or ``edge`` over the curves, ranked
    within their strata. [] where fewer than `FEWEST_CURVES` have that, or all of each stratum have the same."""
    frame = curves[curves[target].notna()].reset_index(drop=True)
    if len(frame) < FEWEST_CURVES or not _differs_within_a_stratum(frame, target):
        return []
    mechanisms = list(dict.fromkeys(frame["mechanism"]))
    return [_of_curves(frame, each, target, mechanisms) for each in OF_CURVES if frame[each.column].notna().any()]


def _of_curves(frame: Frame, predictor: Predictor, target: str, mechanisms: Sequence[str]) -> Scored:
    """Return one predictor's rank correlations over the curves of which it is known."""
    known = frame[frame[predictor.column].notna()]
    parts = {name: known[known["mechanism"] == name] for name in mechanisms} | {POOLED: known}
    scopes = {name: _rho(part, predictor, target) for name, part in parts.items()}
    beyond = {}
    for other in baselines(OF_CURVES):
        both = known[known[other.column].notna()]
        if len(both) >= FEWEST_CURVES and not predictor.is_baseline:
            beyond[other.column] = _rho(both, predictor, target).less(_rho(both, other, target))
    return Scored(predictor, scopes, {name: len(part) for name, part in parts.items()}, beyond,
                  _decades(known, predictor, target))  # fmt: skip


def _rho(part: Frame, predictor: Predictor, target: str) -> Estimate:
    if len(part) < FEWEST_CURVES:
        return Estimate(np.nan, np.nan, np.nan, np.empty(0))
    return spearman(predictor.sign * part[predictor.column], part[target], draws_of(part), list(part["stratum"]))


def _decades(known: Frame, predictor: Predictor, target: str) -> float:
    if not predictor.is_rate:
        return np.nan
    usable = known[(known[predictor.column] > 0) & np.isfinite(known[predictor.column])]
    return float(np.median(np.abs(np.log10(usable[predictor.column] / usable[target])))) if len(usable) else np.nan


def best_baseline(scored: Sequence[Scored]) -> Scored | None:
    """Return the baseline that does best over all, chosen after the fact, which can only make it harder to beat."""
    found = [each for each in scored if each.predictor.is_baseline and not np.isnan(each.scopes[POOLED].value)]
    return max(found, key=lambda each: each.scopes[POOLED].value, default=None)


def verdict(difference: Estimate) -> str:
    """Say what a difference to a baseline amounts to: better, worse, or cannot tell (the interval includes 0, or there
    is none)."""
    if not difference.has_interval or difference.low <= 0 <= difference.high:
        return "cannot tell"
    return "better" if difference.low > 0 else "worse"


__all__ = ("FEWEST_UNITS", "OF_CURVES", "OF_RUNS", "POOLED", "SAME_RATE", "Predictor", "Scored", "best_baseline",
           "draws_of", "judged", "of_curves", "of_runs", "unit_of", "verdict")  # fmt: skip
