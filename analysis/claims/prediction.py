"""Judge whether early α_max predicts broken runs, best rates and edges, against free baselines.

Cases without any benefit are reported too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.claims.claim import Claim, Verdict, signed
from analysis.numbers import early_measurements
from analysis.numbers.early_measurements import fate_counts, name_runs
from analysis.numbers.prediction import (
    FEWEST_CURVES,
    FEWEST_GROUPS,
    GROUPS,
    LEFT_OUT,
    NEAR,
    OF_CURVES,
    OF_RUNS,
    POOLED,
    SAME_RATE,
    TWO_GROUPS,
    Predictor,
    Scored,
    best_baseline,
    draws_of,
    select_judged,
    unit_of,
    verdict,
)
from analysis.numbers.ranking import FEWEST_UNITS, NUM_DRAWS, Estimate
from analysis.study.load import Frame, Study
from analysis.words import count_range, join_words, plural

# predictors with a sentence of their own, by question
MEANT = ("alpha_max_ratio", "paper_alpha_max_ratio", "alpha_max", "critical_ratio", "sharpness", "adam_ratio")
MEANT_OF_ENDS = ("alpha_max_ratio", "paper_alpha_max_ratio", "alpha_max")
MEANT_OF_CURVES = ("alpha_cross", "alpha_max", "critical_cross")
EVENTS = {"broke": "diverge or spike", "unstable": "end other than stable"}
TARGETS = {"best_lr": "the best learning rate", "edge": "the edge"}
NARROW = (
    "With so few units they are rather too narrow, and where all draws agree (1.00 to 1.00) have no width at all: "
    "that is what these runs show, not how sure it is."
)
RANKED_LAST = "without any finite α_max such a run ranks as α_max = 0"
WHY_NOT = {
    early_measurements.BEFORE: "diverged or spiked by step k: known without any measurement",
    early_measurements.DURING: "diverged or spiked between step k and the horizon, to which α_max itself has looked",
    early_measurements.UNMEASURED: "finished or diverged later, but have no α_max at step k",
    early_measurements.TOO_SHORT: "ended by the horizon",
    early_measurements.NO_RESULT: "have no result",
}


def claims_on_runs(runs: Frame, scored: Sequence[Scored], event: str) -> list[Claim]:
    """Return a claim for each predictor in question; one "not judged" if ``scored`` is empty.

    Args:
        runs: `early_runs`.
        scored: `prediction.score_runs`.
        event: ``broke`` or ``unstable``.
    """
    if not scored:
        return [Claim(f"which runs {EVENTS[event]}", "not judged", _nothing_to_judge(runs, event))]
    known = {each.predictor.column: each for each in scored}
    asked = MEANT if event == "broke" else MEANT_OF_ENDS  # the table has the others
    return [_judge_runs(known[name], event) for name in asked if name in known]


def _judge_runs(scored: Scored, event: str) -> Claim:
    """Return one predictor's claim: all runs, same rate, each baseline, each set."""
    found = scored.scopes[POOLED]
    name = _opening(scored.predictor.name)
    if math.isnan(found.value):
        alike = "all" if len(scored.sets) < 2 else "those of each set"
        why = f"of the {plural(scored.numbers[POOLED], 'run')} that have it {alike} ended alike"
        return Claim(f"{name}: which runs {EVENTS[event]}", "not judged", f"{name} cannot be judged: {why}.")
    text = (
        f"{name} at step k tells which of {plural(scored.numbers[POOLED], 'run')} {EVENTS[event]} with an AUC of "
        f"{_value(found)}{_chance(found)}; {_compare_at_same_rate(scored)}"
    )
    claim = _add_differences(
        scored, f"{name}: which runs {EVENTS[event]}", f"{text}. ", OF_RUNS, scored.numbers[POOLED]
    )
    return replace(claim, text=" ".join(filter(None, (claim.text, _set_by_set(scored)))))


WITHIN = f"within {100 * (NEAR - 1):.0f} %"
AT_SAME_RATE = f"at the same rate ({WITHIN})"
NO_PAIRS = "no two runs of nearly the same rate ended differently"


def _compare_at_same_rate(scored: Scored) -> str:
    """Return the share of the pairs of runs at the same rate that a predictor orders rightly."""
    same, numbers = scored.scopes[SAME_RATE], scored.numbers
    if math.isnan(same.value):
        return f"the rate orders all {numbers[LEFT_OUT]} pairs {WITHIN} alike" if numbers[LEFT_OUT] else NO_PAIRS
    of_two, value = numbers[TWO_GROUPS], _value(scored.scopes[TWO_GROUPS])
    two = f"; a share of {value} of the {of_two} of two series" if of_two else ""
    return (
        f"{AT_SAME_RATE} it orders a share of {_value(same)} of {plural(numbers[SAME_RATE], 'pair')} of "
        f"{plural(numbers[GROUPS], 'group')} rightly{_chance(same)}{two}"
    )


def _set_by_set(scored: Scored) -> str:
    """Compare a ratio to the rate with the rate alone, set by set. "" for a single set.

    A mean may hide differences between sets.
    """
    if len(scored.sets) < 2 or not scored.predictor.column.endswith("_ratio"):
        return ""
    told = [
        f"{name} {difference_text(found['lr'])}"
        for name, found in scored.beyond_in.items()
        if "lr" in found and not math.isnan(found["lr"].value)
    ]
    return f"Set by set, less learning rate α alone: {'; '.join(told)}." if told else ""


def _chance(estimate: Estimate) -> str:
    if not estimate.has_interval:
        return ""
    if estimate.high < 0.5:
        return ", the wrong way round: the runs that do have the calmer value"
    return ", not told from chance (0.5)" if estimate.low <= 0.5 else ""


def claims_on_curves(curves: Frame, scored: Sequence[Scored], target: str) -> list[Claim]:
    """Return a claim for each predicted rate; one "not judged" if ``scored`` is empty.

    Args:
        curves: `early_curves`.
        scored: `prediction.score_curves`.
        target: ``best_lr`` or ``edge``.
    """
    if not scored:
        return [Claim(TARGETS[target], "not judged", _nothing_to_rank(curves, target))]
    known = {each.predictor.column: each for each in scored}
    return [_judge_curves(known[name], target) for name in MEANT_OF_CURVES if name in known]


def _judge_curves(scored: Scored, target: str) -> Claim:
    """Return the claim on one predictor's rank correlation with a rate."""
    found, name = scored.scopes[POOLED], _opening(scored.predictor.name)
    subject = f"{name}: {TARGETS[target]}"
    if math.isnan(found.value):
        return Claim(subject, "not judged", f"{name} is the same for all curves, or of too few: it ranks nothing.")
    number = scored.numbers[POOLED]
    bounds = f" (a bound in {scored.num_bounds}: they meet at no rate that was swept)" if scored.num_bounds else ""
    where = " of the others" if scored.num_bounds else ""
    off = f", {scored.decades:.2f} decades off in the median{where}" if not math.isnan(scored.decades) else ""
    text = f"{name} ranks {TARGETS[target]} of {plural(number, 'curve')}{bounds} with ρ = {_value(found)}{off}. "
    return _add_differences(scored, subject, text, OF_CURVES, scored.numbers[POOLED])


def _add_differences(scored: Scored, subject: str, text: str, predictors: Sequence[Predictor], number: int) -> Claim:
    """Return the claim with the predictor's difference from each baseline."""
    names = {each.column: each.name for each in predictors}
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "cannot tell": []}
    for column, difference in scored.beyond.items():
        if not math.isnan(difference.value):
            by_verdict[verdict(difference)].append(f"{names[column]} ({difference_text(difference)})")
    parts = [f"better than {join_words(by_verdict['better'])}"] if by_verdict["better"] else []
    parts += [f"worse than {join_words(by_verdict['worse'])}"] if by_verdict["worse"] else []
    parts += [f"cannot tell from {join_words(by_verdict['cannot tell'])}"] if by_verdict["cannot tell"] else []
    found = scored.scopes[POOLED]
    return Claim(subject, _verdict(by_verdict), text + _opening("; ".join(parts)) + "." if parts else text.strip(),
                 n=number, effect=number_text(found.value), interval=interval_text(found))  # fmt: skip


def _verdict(by_verdict: dict[str, list[str]]) -> Verdict:
    """Return "holds" if the predictor beats every baseline, "contradicted" if one beats it."""
    if by_verdict["worse"]:
        return "contradicted"
    return "holds" if by_verdict["better"] and not by_verdict["cannot tell"] else "undecided"


def is_on_alpha_max(claim: Claim) -> bool:
    """Return whether a claim concerns α_max itself or is not judged."""
    return claim.verdict == "not judged" or "α_max" in claim.subject


def conclusion(claims: Sequence[Claim]) -> str:
    """Return one sentence: the predictors better than every baseline, and the rest in numbers."""
    asked = [claim for claim in claims if claim.verdict in ("holds", "contradicted", "undecided")]
    if not asked:
        return "Nothing can be said here of whether α_max predicts the edge."
    helps = [claim.subject for claim in asked if claim.verdict == "holds"]
    loses = sum(claim.verdict == "contradicted" for claim in asked)
    opening = f"Better than every baseline: {join_words(helps)}. Of" if helps else "Not shown: of"
    return (
        f"{opening} {plural(len(asked), 'question')}, a baseline answers {loses} better and "
        f"{len(asked) - loses - len(helps)} as well, within the noise."
    )


def best_of_baselines(scored: Sequence[Scored], what: str, kind: str) -> str:
    """Name the best baseline; "" if none is known.

    Args:
        scored: all scores.
        what: the predicted outcome, in words.
        kind: AUC or ρ.
    """
    best = best_baseline(scored)
    if best is None:
        return ""
    return f"Of the baselines, {best.predictor.name} tells {what} best: {kind} {_value(best.scopes[POOLED])}."


ANSWERS = {"better": "Better than", "worse": "Worse than", "cannot tell": "Undecided against"}


def answer(scored: Sequence[Scored]) -> str:
    """Return how α_max / α compares with the best baseline in telling which runs break, and with the rate at one rate.

    "" if that is not judged.
    """
    own, best = _ratio(scored), best_baseline(scored)
    if best is None or own is None or math.isnan(own.scopes[POOLED].value):
        return ""
    found, same = ANSWERS[verdict(own.beyond[best.predictor.column])], own.scopes[SAME_RATE]
    by_rate = next(each for each in scored if each.predictor.column == "lr").scopes[SAME_RATE]
    there = "Better" if same.low > 0.5 else "Worse" if same.high < 0.5 else "Undecided"
    at_one_rate = (
        f"{there} {AT_SAME_RATE}: a share of {_value(same)} of {plural(own.numbers[SAME_RATE], 'pair')} in order, "
        f"by the rate {number_text(by_rate.value)}"
    )
    return (
        f"{found} the {best.predictor.name} at telling which runs break: AUC {_value(own.scopes[POOLED])} "
        f"against {_value(best.scopes[POOLED])}. "
        f"{_opening(_compare_at_same_rate(own)) if math.isnan(same.value) else at_one_rate}"
    )


def _ratio(scored: Sequence[Scored]) -> Scored | None:
    return next((each for each in scored if each.predictor.column == "alpha_max_ratio"), None)


def compare_with_baseline(scored: Sequence[Scored], event: str) -> str:
    """Return the AUC of α_max / α beside the best baseline's, and its pairs at one rate; "" if an AUC is unknown.

    Args:
        scored: all scores of the event.
        event: ``broke`` or ``unstable``.
    """
    best = best_baseline(scored)
    own = _ratio(scored)
    if best is None or own is None or math.isnan(own.scopes[POOLED].value):
        return ""
    return (
        f"Which runs {EVENTS[event]}: {own.predictor.name} tells with an AUC of {_value(own.scopes[POOLED])}, "
        f"{best.predictor.name} with {_value(best.scopes[POOLED])}. {_opening(_compare_at_same_rate(own))}."
    )


def count_runs(runs: Frame) -> list[str]:
    """Return sentences: judged runs, others with reasons, non-finite values."""
    frame, counts = select_judged(runs), fate_counts(runs)
    groups = frame["group"].nunique()
    steps = count_range(runs["step"]), count_range(runs["horizon"])
    flat = frame["status"] == "plateaued"
    called = int((flat & frame["broke"]).sum())
    sentences = [
        f"Of {plural(len(runs), 'run')} {len(frame)} are judged ({plural(groups, 'group')}, "
        f"{plural(int(frame['seed'].nunique()), 'seed')}, {plural(int(frame['curve'].nunique()), 'curve')}): "
        f"{int(frame['broke'].sum())} of them diverged or spiked later ({called} of these exploded or learned nothing "
        f"in the end), {int((flat & ~frame['broke']).sum())} learned nothing without, "
        f"{int((frame['status'] == 'stable').sum())} ended stable. k is step {steps[0]}, the horizon step {steps[1]}."
    ]
    sentences += [
        f"Not judged: {plural(number, 'run')} that {WHY_NOT[fate]} ({name_runs(runs[runs['fate'] == fate])})."
        for fate, number in counts.items()
        if fate in WHY_NOT
    ]
    if 0 < (seeds := frame["seed"].nunique()) < 3:
        sentences.append("Two seeds give indications only." if seeds == 2 else "One seed is no result.")
    return [" ".join(sentences), *_describe_nonfinite(frame)]


def _describe_nonfinite(frame: Frame) -> list[str]:
    """Return a sentence on judged runs with non-finite values and their ranks; [] if none."""
    lost, passed = frame[frame["lost"] > 0], frame[frame["nonfinite"] > 0]
    infinite, no_loss, no_norm = (
        frame[np.isposinf(frame["alpha_max"])],
        *(frame[frame[column].isna()] for column in ("loss", "grad_norm")),
    )
    did = (
        (lost, f"lost measured steps to a loss that is not finite ({{}}): {RANKED_LAST}."),
        (passed, "passed a loss or gradient norm that is not finite, which ranks as ∞ ({})."),
        (infinite, "found no limit at any step and rank as ∞ ({})."),
        (no_loss, "logged no loss up to step k ({})."),
        (no_norm, "logged no gradient norm up to step k ({})."),
    )
    told = [f"{plural(len(runs), 'judged run')} {text.format(name_runs(runs))}" for runs, text in did if len(runs)]
    return [" ".join(told)] if told else []


UNITS = (
    f"Intervals: 95 %, percentiles of {NUM_DRAWS:,} draws with replacement of whole groups (a mechanism with its "
    "optimizer and other settings, all seeds and rates of a study), since a mechanism's runs resemble each other and "
    f"the question is about the next one; of fewer than {FEWEST_GROUPS} groups of curves (all rates of a seed, which "
    f"share initialisation and the order of their data), and then about these groups alone. {NARROW}"
)


def describe_sets(runs: Frame) -> str:
    """Describe the sets within which runs and curves are compared; "" for a single set.

    ``runs``: `early_runs`.
    """
    number = runs["stratum"].nunique()
    if number < 2:
        return ""
    return (
        f"Only what is alike in study, optimizer, objective, data and model is compared ({number} such sets here): an "
        "AUC is over pairs of runs of one set, ranks are among the curves of one, as shares of their number. A set in "
        "which all runs ended alike forms no pair and is not counted."
    )


def name_units(frame: Frame, what: str, all_sets: int) -> str:
    """Name the sets behind a question and the units its intervals draw.

    "" if the question is not judged.

    Args:
        frame: `telling` or `ranked`.
        what: the question in words.
        all_sets: number of sets in all.
    """
    if frame.empty:
        return ""
    sets = list(dict.fromkeys(frame["stratum"]))
    of_sets = f" of {join_words(sets)}" if all_sets > 1 else ""
    number, unit = draws_of(frame).num_units, "whole group" if unit_of(frame) == "group" else "curve"
    units = plural(number, unit)
    drawn = f"intervals over {units}" if number >= FEWEST_UNITS else f"no interval over {units}"
    return f"{_opening(what)}: judged of {len(frame)}{of_sets}, {drawn}."


def scale(studies: Sequence[Study]) -> str:
    """Report the range of parameters and planned steps over all studies."""
    runs = [study.runs for study in studies]
    sizes, steps = (
        count_range(value for frame in runs for value in frame[name]) for name in ("num_params", "planned_steps")
    )
    return f"All this is at {sizes} parameters and {steps} steps."


def _nothing_to_judge(runs: Frame, event: str) -> str:
    frame = select_judged(runs)
    if frame.empty:
        why = "no run was measured at an early checkpoint and went on beyond the horizon"
    else:
        did = frame[event]
        every = "none" if not did.any() else "every" if did.all() else "every or none of those that can be compared"
        why = f"of {plural(len(frame), 'judged run')} {every} did, and that needs some of both"
    return f"Which runs {EVENTS[event]} cannot be judged: {why}."


def _nothing_to_rank(curves: Frame, target: str) -> str:
    known = curves[target].dropna() if target in curves else []
    if len(known) >= FEWEST_CURVES:
        alike = "" if curves["stratum"].nunique() == 1 else " that can be compared"
        return f"{_opening(TARGETS[target])} cannot be ranked: it is the same for all {len(known)} curves{alike}."
    return (
        f"{_opening(TARGETS[target])} cannot be ranked: {len(known)} of {plural(len(curves), 'curve')} have one, and "
        f"{FEWEST_CURVES} are needed."
    )


def interval_text(estimate: Estimate) -> str:
    return f"{number_text(estimate.low)} to {number_text(estimate.high)}" if estimate.has_interval else ""


def number_text(value: float) -> str:
    """Return an AUC or a correlation in two digits. With a real minus, but no −0.00."""
    return f"{value + 0.0:.2f}".replace("-0.00", "0.00").replace("-", "−")


def difference_text(difference: Estimate) -> str:
    """Return a difference with its interval: −0.05, −0.12 to +0.01."""
    within = f", {signed(difference.low)} to {signed(difference.high)}" if difference.has_interval else ""
    return f"{signed(difference.value)}{within}"


def _value(estimate: Estimate) -> str:
    within = f" ({interval_text(estimate)})" if estimate.has_interval else ""
    return f"{number_text(estimate.value)}{within}"


def _opening(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith("α") else text
