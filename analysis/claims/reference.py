"""Judge every mechanism of a study against the study's reference: windows, NLL, stable steps, α_max and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from analysis.claims.claim import Claim, decline_pair, interval_text, signed, verdict_of, verdict_words, word_claim
from analysis.claims.pairs import Measure, Pair, find_measures
from analysis.claims.rivals import best_claim, throughput_claim
from analysis.claims.windows import window_claim
from analysis.numbers.at_best_rate import OWN_STATE, Numbers, numbers_of
from analysis.numbers.common_windows import common_windows
from analysis.numbers.comparison import Comparison, decide
from analysis.numbers.learning import reasons_untrained, say_lacking
from analysis.numbers.spread import p_of_bounds
from analysis.numbers.step_comparison import compare_stable_steps
from analysis.numbers.step_shares import concerns_steps
from analysis.numbers.windows import outcomes, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.study.reference import references
from analysis.words import join_words, lr_text, plural, significant
from stability.primary import NamedSeries, find_named

BEYOND = "NLL beyond"
OWN, COMMON, BEST, STABLE = "own window", "common window", "best", "% stable"
RATIO, COST = "α_max / α", "time of a step"
DECLARED = {  # a sweep's word for the quantity of its primary claim
    "window": OWN,
    "common_window": COMMON,
    "best": f"{BEST} NLL",
    "accuracy": f"{BEST} accuracy",
    "stable_steps": STABLE,
}


@once_per_study
def reference_claims(study: Study) -> list[Claim]:
    """Return the claims on each series with a reference, in the study's order.

    A pair with a series that learned too little has one "not judged".
    """
    pairs, lacking = references(study), reasons_untrained(study)
    numbers = numbers_of(study, {name: name for name in study.series if name in {*pairs, *pairs.values()}}, {})
    claims = []
    for series, plain in pairs.items():
        if few := [name for name in (series, plain) if lacking[name]]:
            statement = f"{series} is compared with {plain}"
            claim = decline_pair(f"{series} beside {plain}", statement, (series, plain), say_lacking(study, few))
            claims.append(replace(claim, about=("", series)))
        else:
            found = _claims_on(study, series, plain, numbers)
            claims += [replace(each, about=(quantity, series)) for quantity, each in found]
    return claims


def find_primary(study: Study, claims: Iterable[Claim]) -> dict[tuple[str, ...], str]:
    """Return the comparisons that the sweep's primary claim fits, with their series: one, if it is a good name.

    Args:
        study: its spec has ``primary``, e.g. "sc.window", "sc width=256.window", "qk_norm=rmsnorm.window".
        claims: `reference_claims`.
    """
    name, _, quantity = str(study.spec.get("primary") or "").rpartition(".")
    about = DECLARED.get(quantity)
    compared = {claim.about[1]: claim.test for claim in claims if claim.test and claim.about[0] == about}
    named = find_named([_name_parts(study, series) for series in compared], name.split())
    return {compared[series]: series for series in named}


def _name_parts(study: Study, series: str) -> NamedSeries:
    """Return a series with the names of its parts, as in its first run."""
    run = study.of(series).iloc[0]
    parts = tuple(str(run[part]) for part in ("mechanism", "residual", "norm", "optimizer"))
    return NamedSeries(series, parts, str(run["variant"]))


def _claims_on(study: Study, series: str, plain: str, numbers: dict[str, Numbers]) -> Iterator[tuple[str, Claim]]:
    """Yield a pair's quantities and claims, one for each quantity with data. A single rate has no window."""
    pair = (series, plain)
    is_swept = all(study.of(name)["lr"].nunique() > 1 for name in pair)
    if is_swept:
        yield OWN, window_claim(study, f"{OWN}: {series}", f"{series}'s own window is wider than {plain}'s", pair)
    if is_swept and set(pair) <= common_windows(study).keys():
        statement = f"{series}'s common window is wider than {plain}'s"
        yield COMMON, window_claim(study, f"{COMMON}: {series}", statement, pair, is_common=True)
    for measure in find_measures(study):
        yield f"{BEST} {measure.word}", _best(study, measure, pair)
    if beyond := _beyond(study, pair):
        yield BEYOND, beyond
    if steps := _stable_steps(study, pair):
        yield STABLE, steps
    if ratio := _ratio(numbers[series], numbers[plain]):
        yield RATIO, ratio
    yield COST, _cost(study, numbers[series], numbers[plain])


def _best(study: Study, measure: Measure, pair: tuple[str, str]) -> Claim:
    """Judge whether a series' best value is better than its reference's."""
    series, plain = pair
    statement = f"{series} reaches a {'lower' if measure.better < 0 else 'higher'} {measure.word} than {plain}"
    return best_claim(study, f"{BEST} {measure.word}: {series}", measure, Pair(plain, series, pair), statement)


def _beyond(study: Study, pair: tuple[str, str]) -> Claim | None:
    """Judge the mean NLL over the rates above the reference's window; None without such a rate.

    A run counts as at most the NLL at initialisation, the smaller one of the pair's; a diverged one as that.
    """
    series, plain = pair
    found = windows(study)[plain].median
    if found is None:
        return None
    lrs = [lr for lr in outcomes(study, plain).index if lr > found.high.lr and lr in outcomes(study, series).index]
    if not lrs:
        return None
    cap = min(float(study.of(name)["init_nll"].median()) for name in pair)
    own, other = (_mean_capped(study, name, lrs, cap) for name in pair)
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return None
    differences = [own[seed] - other[seed] for seed in seeds]
    direction, interval = decide(differences, differences)
    result = Comparison(direction, len(seeds), "whole", interval)
    mean = float(np.mean(differences))
    first, second = (float(np.mean([means[seed] for seed in seeds])) for means in (own, other))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    side, unit = "lower" if mean < 0 else "higher", " nats" if wording.words(study).in_nats else ""
    return word_claim(
        Claim(
            f"{BEYOND}: {series}",
            verdict_of(result, holds_if=-1),
            statement=f"{series} has a lower NLL than {plain} above {plain}'s window",
            n=len(seeds),
            effect=f"{series} {first:.3f}, {plain} {second:.3f}",
            interval=interval_text(interval, len(seeds), unit.strip(), 3),
            finding=f"above {plain}'s window ({span}) {series}'s NLL is {abs(mean):.3f}{unit} {side} than {plain}'s",
            difference=f"{signed(mean, 3)}{unit}",
            test=(BEYOND, *pair),
            p=p_of_bounds(differences, differences),
            differences=tuple(differences),
        )
    )


def _mean_capped(study: Study, series: str, lrs: list[float], cap: float) -> dict[int, float]:
    """Return by seed the mean over the rates of min(NLL, cap); only seeds with all results."""
    table = outcomes(study, series).loc[lrs]
    known = [seed for seed in table.columns if table[seed].notna().all()] if math.isfinite(cap) else []
    return {int(seed): float(table[seed].clip(upper=cap).mean()) for seed in known}


def _stable_steps(study: Study, pair: tuple[str, str]) -> Claim | None:
    """Judge the share of stable steps at the highest common rates, from the runs' own state; None if not measured."""
    series, plain = pair
    found = compare_stable_steps(study, series, plain, OWN_STATE) if concerns_steps(study) else None
    if found is None:
        return None
    difference = signed(found.first - found.second, 0)
    rates = join_words(lr_text(lr) for lr in found.lrs)
    diverged = [f"{plural(count, 'run')} of {name}" for name, count in zip(pair, found.diverged, strict=True) if count]
    return word_claim(
        Claim(
            f"{STABLE}: {series}",
            verdict_of(found.result),
            statement=f"{series} has more stable steps than {plain} at the highest rates",
            n=found.result.n,
            effect=f"{series} {found.first:.0f} %, {plain} {found.second:.0f} %",
            interval=interval_text(found.result.interval, found.result.n, "points", 0),
            finding=f"{found.first:.0f} % of {series}'s steps are stable at {rates}, {found.second:.0f} % of {plain}'s",
            note=f"Diverged, counted as 0 %: {join_words(diverged)}." if diverged else "",
            difference=f"{difference} points",
            test=(STABLE, *pair),
            p=found.result.p,
            differences=found.differences,
        )
    )


def _ratio(own: Numbers, plain: Numbers) -> Claim | None:
    """Judge whether α_max over the rate is larger, each at its best rate; None if not measured."""
    first, second = own.by_seed["ratio"], plain.by_seed["ratio"]
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = [first[seed][0] - second[seed][0] for seed in seeds]
    direction, interval = decide(differences, differences)
    result = Comparison(direction, len(seeds), "whole", interval)
    times = 10 ** float(np.mean(differences))
    kind = "range" if len(seeds) < 3 else "95 %"
    return word_claim(
        Claim(
            f"{RATIO}: {own.series}",
            verdict_of(result),
            statement=f"{own.series}'s α_max / α at its best rate is larger than {plain.series}'s",
            n=len(seeds),
            effect=f"{own.series} {significant(own.ratio.median)}, {plain.series} {significant(plain.ratio.median)}",
            interval=f"{kind}: ×{10 ** interval[0]:.2f} to ×{10 ** interval[1]:.2f}" if len(seeds) > 1 else "",
            finding=f"{own.series}'s α_max / α at its best rate is {times:.2f} times {plain.series}'s",
            difference=f"×{times:.2f}",
            test=(RATIO, own.series, plain.series),
            p=p_of_bounds(differences, differences),
            differences=tuple(differences),
        )
    )


def _cost(study: Study, own: Numbers, plain: Numbers) -> Claim:
    """Judge whether a step takes less time, by turns side by side; the runs' own clocks decide nothing."""
    subject, statement = f"{COST}: {own.series}", f"a step of {own.series} takes less time than one of {plain.series}"
    found = throughput_claim(study, own.series, plain.series, statement=statement)
    if found.verdict != "not judged":
        return replace(found, subject=subject, difference=found.effect)
    seeds = sorted(own.step_s.keys() & plain.step_s.keys())
    times = [own.step_s[seed] / plain.step_s[seed] for seed in seeds if plain.step_s[seed] > 0]
    known = [each for each in times if math.isfinite(each)]
    difference = f"×{float(np.median(known)):.2f}" if known else ""
    return replace(found, subject=subject, n=len(known), difference=difference)


def against_reference(claims: Iterable[Claim]) -> dict[str, dict[str, Claim]]:
    """Return a study's judged comparisons with the reference by series and quantity.

    ``claims``: `analysis.claims.judging.judge`, whose verdicts are corrected. A series that is not compared has one
    claim under "".
    """
    found: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        quantity, series = claim.about
        if series:
            found.setdefault(series, {})[quantity] = claim
    return found


def short_verdict(claim: Claim) -> str:
    """Return a verdict for a narrow cell, e.g. "supported (n = 3)", "needs 17 seeds in all", "needs 24 runs (grid)"."""
    words = verdict_words(claim).removeprefix("Undecided: ").replace("about ", "").replace("more than ", "> ")
    if claim.verdict == "unresolved":
        return f"{words.removeprefix('Not resolved by this grid: lr=edge ').removesuffix(' more runs')} runs (grid)"
    return words[0].lower() + words[1:]
