"""Score predictors at step k against free baselines: broken runs, best learning rate, edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.numbers.early_measurements import JUDGED
from analysis.numbers.ranking import FEWEST_UNITS, Draws, Estimate, auc, near_pairs, share_in_order, spearman
from analysis.study.load import Frame

POOLED, SAME_RATE = "all", "same rate"
# of the pairs at the same rate: those of two groups; number of groups; pairs beyond the balance of `share_in_order`
TWO_GROUPS, GROUPS, LEFT_OUT = "same rate, two groups", "groups at the same rate", "pairs beyond the balance"
# Largest ratio of two rates that count as the same. A rate orders the runs of its own curve almost perfectly, so pairs
# at unlike rates ask little of others. In a study of 144 runs near their edges it ordered half of the pairs within 5 %,
# and 65 % of those within 10 %. Pairs at an equal distance from their curves' edges would use the outcome.
NEAR = 1.05
FEWEST_GROUPS = 4  # below, intervals draw curves instead of groups
FEWEST_CURVES = 4  # below, a rank correlation means nothing
NOTHING = Estimate(np.nan, np.nan, np.nan, np.empty(0))


@dataclass(frozen=True)
class Predictor:
    """A column in `early_runs` or `early_curves`.

    Attributes:
        column, name: column, and its name in tables.
        sign: −1 if low values predict a break (for curves: a low rate), fixed before any result.
        is_baseline: free to measure.
        is_rate: a learning rate, so its distance from the truth is defined.
        is_told: uses part of the outcome; never a baseline for others.
    """

    column: str
    name: str
    sign: int
    is_baseline: bool = False
    is_rate: bool = False
    is_told: bool = False


OF_RUNS = (
    Predictor("alpha_max", "α_max", -1),
    Predictor("alpha_max_ratio", "α_max / α", -1),
    Predictor("paper_alpha_max", "α_max, paper's warm-up state", -1),
    Predictor("paper_alpha_max_ratio", "α_max / α, paper's warm-up state", -1),
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
    Predictor("decade_below", "one decade below divergence", +1, is_baseline=True, is_rate=True, is_told=True),
)


@dataclass(frozen=True)
class Scored:
    """A predictor's scores by scope: each mechanism, `POOLED`, and for runs `SAME_RATE` and `TWO_GROUPS`.

    Attributes:
        predictor: the scored column.
        scopes: score by scope.
        numbers: runs (curves) with a value by scope; for `SAME_RATE` and `TWO_GROUPS` the pairs.
        beyond: pooled difference from each baseline by column, on rows with both.
        sets: score within each stratum.
        beyond_in: the differences within each stratum.
        decades: for a rate, median distance to the truth in decades, without bounds.
        num_bounds: rates known only as bounds.
    """

    predictor: Predictor
    scopes: Mapping[str, Estimate]
    numbers: Mapping[str, int]
    beyond: Mapping[str, Estimate]
    sets: Mapping[str, Estimate]
    beyond_in: Mapping[str, Mapping[str, Estimate]]
    decades: float = np.nan
    num_bounds: int = 0


def unit_of(frame: Frame) -> str:
    """Return the column to resample: whole groups if there are enough, else curves.

    A group is a study's series with all seeds and rates: seeds within a mechanism are more alike than mechanisms. A
    curve is all rates of a seed, with shared initialisation and data order. Intervals over curves concern these groups
    alone.
    """
    return "group" if frame["group"].nunique() >= FEWEST_GROUPS else "curve"


def draws_of(frame: Frame) -> Draws:
    return Draws(list(frame[unit_of(frame)]))


def select_judged(runs: Frame) -> Frame:
    """Return the runs measured at step k and not broken before the horizon."""
    return runs[runs["fate"] == JUDGED].reset_index(drop=True)


def telling(runs: Frame, event: str) -> Frame:
    """Return the judged runs from strata with both outcomes; other strata yield no pairs."""
    return _varying(select_judged(runs), event)


def select_ranked(curves: Frame, target: str) -> Frame:
    """Return the curves with ``best_lr`` or ``edge``, from strata with differing values."""
    return _varying(curves[curves[target].notna()], target) if target in curves else curves


def _varying(frame: Frame, column: str) -> Frame:
    number = frame.groupby("stratum")[column].transform("nunique")
    return frame[number > 1].reset_index(drop=True)


def score_runs(runs: Frame, event: str) -> list[Scored]:
    """Return the AUC of every measured predictor; [] if no stratum has both outcomes.

    ``runs``: `early_runs`. ``event``: its column ``broke`` or ``unstable``.
    """
    frame = telling(runs, event)
    return [_score_run_predictor(frame, each, event) for each in OF_RUNS if frame[each.column].notna().any()]


def _score_run_predictor(frame: Frame, predictor: Predictor, event: str) -> Scored:
    known = _select_known(frame, predictor, event)
    scored = _score(frame, known, predictor, event, _auc, OF_RUNS)
    scopes, numbers = _score_at_same_rate(known, predictor, event)
    return replace(scored, scopes={**scored.scopes, **scopes}, numbers={**scored.numbers, **numbers})


def _score_at_same_rate(known: Frame, predictor: Predictor, event: str) -> tuple[dict[str, Estimate], dict[str, int]]:
    """Return the shares of pairs within `NEAR` that a predictor orders rightly, and the counts."""
    places, groups = np.log10(known["lr"].to_numpy(dtype=float)).round(9), known["group"].to_numpy()
    pairs = first, second = near_pairs(places, known[event], list(known["stratum"]), np.log10(NEAR) + 1e-9)
    values, draws, apart = predictor.sign * known[predictor.column], draws_of(known), groups[first] != groups[second]
    same, number = share_in_order(values, places, pairs, draws)
    two, of_two = share_in_order(values, places, (first[apart], second[apart]), draws)
    counts = {GROUPS: len(set(groups[first]) | set(groups[second])), LEFT_OUT: len(first) - number}
    return {SAME_RATE: same, TWO_GROUPS: two}, {SAME_RATE: number, TWO_GROUPS: of_two, **counts}


def score_curves(curves: Frame, target: str) -> list[Scored]:
    """Return every predictor's Spearman correlation with ``best_lr`` or ``edge`` over curves.

    Ranks are taken within strata. [] below `FEWEST_CURVES` curves, or if values never differ within a stratum.
    """
    frame = select_ranked(curves, target)
    if len(frame) < FEWEST_CURVES:
        return []
    return [_score_curve_predictor(frame, each, target) for each in OF_CURVES if frame[each.column].notna().any()]


def _score_curve_predictor(frame: Frame, predictor: Predictor, target: str) -> Scored:
    known = _select_known(frame, predictor, target)
    scored = _score(frame, known, predictor, target, _rho, OF_CURVES)
    bound = f"{predictor.column}_is_bound"
    is_bound = known[bound].astype(bool) if bound in known else known[target].isna()
    return replace(scored, decades=_decades(known[~is_bound], predictor, target), num_bounds=int(is_bound.sum()))


def _select_known(frame: Frame, predictor: Predictor, outcome: str) -> Frame:
    """Return the comparable rows with a known predictor. All known rows if none is comparable."""
    known = frame[frame[predictor.column].notna()]
    able = _varying(known, outcome)
    return able if len(able) else known


def _score(
    frame: Frame,
    known: Frame,
    predictor: Predictor,
    outcome: str,
    score: Callable[[Frame, Predictor, str], Estimate],
    predictors: Sequence[Predictor],
) -> Scored:
    """Return one predictor's scores over its known rows."""
    mechanisms, strata = dict.fromkeys(frame["mechanism"]), dict.fromkeys(frame["stratum"])
    parts = {name: known[known["mechanism"] == name] for name in mechanisms} | {POOLED: known}
    sets = {name: known[known["stratum"] == name] for name in strata}

    def beyond(part: Frame) -> dict[str, Estimate]:
        found = {}
        for other in [] if predictor.is_baseline else baselines(predictors):
            both = part[part[other.column].notna()]
            found[other.column] = score(both, predictor, outcome).less(score(both, other, outcome))
        return found

    return Scored(
        predictor,
        scopes={name: score(part, predictor, outcome) for name, part in parts.items()},
        numbers={name: len(part) for name, part in parts.items()},
        beyond=beyond(known),
        sets={name: score(part, predictor, outcome) for name, part in sets.items()},
        beyond_in={name: beyond(part) for name, part in sets.items()},
    )


def _auc(part: Frame, predictor: Predictor, event: str) -> Estimate:
    """Return the AUC over pairs within a stratum."""
    if part.empty:
        return NOTHING
    # Between strata, the meaning of a rate, a limit or a loss differs.
    return auc(predictor.sign * part[predictor.column], part[event], draws_of(part), list(part["stratum"]))


def baselines(predictors: Sequence[Predictor]) -> list[Predictor]:
    """Return the baselines for comparison with predictors."""
    return [each for each in predictors if each.is_baseline and not each.is_told]


def _rho(part: Frame, predictor: Predictor, target: str) -> Estimate:
    if len(part) < FEWEST_CURVES:
        return NOTHING
    return spearman(predictor.sign * part[predictor.column], part[target], draws_of(part), list(part["stratum"]))


def _decades(known: Frame, predictor: Predictor, target: str) -> float:
    if not predictor.is_rate:
        return np.nan
    usable = known[(known[predictor.column] > 0) & np.isfinite(known[predictor.column])]
    return float(np.median(np.abs(np.log10(usable[predictor.column] / usable[target])))) if len(usable) else np.nan


def best_baseline(scored: Sequence[Scored]) -> Scored | None:
    """Return the best pooled baseline.

    The choice is made after the fact, so a predictor can only look worse against it.
    """
    able = [each for each in scored if each.predictor.is_baseline and not each.predictor.is_told]
    found = [each for each in able if not np.isnan(each.scopes[POOLED].value)]
    return max(found, key=lambda each: each.scopes[POOLED].value, default=None)


def verdict(difference: Estimate) -> str:
    """Return better, worse or cannot tell, from a difference to a baseline.

    "cannot tell": the interval includes 0 or is missing.
    """
    if not difference.has_interval or difference.low <= 0 <= difference.high:
        return "cannot tell"
    return "better" if difference.low > 0 else "worse"


__all__ = ("FEWEST_UNITS", "GROUPS", "LEFT_OUT", "NEAR", "OF_CURVES", "OF_RUNS", "POOLED", "SAME_RATE", "TWO_GROUPS",
           "Predictor", "Scored", "best_baseline", "draws_of", "score_curves", "score_runs", "select_judged",
           "select_ranked", "telling", "unit_of", "verdict")  # fmt: skip
