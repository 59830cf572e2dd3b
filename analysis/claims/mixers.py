"""Judge the toolkit paper's claims on mixers, and compare a study's mechanisms with `sa`.

- B.1.2: sigmoid attention needs a norm after it.
- D.7: gating tolerates learning rates 30 % higher.
- D.4.2 and D.5.2: one of two recurrent mixers, or a mixer and softmax attention, has the lower NLL. Each seed's best
  NLL decides.

The first two concern the largest stable learning rate, per seed: the rate at which the NLL leaves 5 % of the best,
interpolated between two rates. A verdict needs the rate at an equal share of what was learned, too: both must agree.
Gates are also judged by the largest rate with a stable verdict, known to one grid step.
The annexes (B.2 to B.4, D) are silent on the largest rates for recurrent mixers. Rules as in `analysis.claims.judging`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from analysis.claims.at_best_rate import best, divergences
from analysis.claims.claim import TOOLKIT, Claim, decline_pair, judge_sign, require_both, sentence, word_claim
from analysis.claims.pairs import Pair
from analysis.claims.pairs import find_measures as measures_of
from analysis.claims.rivals import best_claim
from analysis.numbers.at_best_rate import Bounds
from analysis.numbers.common_windows import equal_share
from analysis.numbers.comparison import TIE_DECADES, bisections_needed, decide_with_lost, p_of_agreement
from analysis.numbers.learning import reasons_untrained, say_lacking
from analysis.numbers.mixers import (
    PLAIN,
    bracket_by_nll,
    common_of,
    edge_by_nll,
    edge_by_verdict,
    groups,
    numbers_of,
)
from analysis.numbers.spread import p_of_bounds
from analysis.numbers.windows import SeriesWindows, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import lr_text, plural

CAUSAL = "causal"
HIGHER_BY_GATES = 1.3  # D.7, without n or an interval
# D.4.2 and D.5.2 (at 3 billion parameters): better mixer, worse mixers, claim
LOWER_NLL = (
    ("gated_deltanet", ("deltanet", "mamba2", "gla"), "Gated DeltaNet models language better (annex D.4.2) than"),
    ("hgrn2", ("mamba2", PLAIN), "HGRN2 models language slightly better (annex D.5.2, at 3B parameters) than"),
)


BY_NLL = "the rate at which the NLL leaves 5 % of the best"
BY_VERDICT = "the largest rate that ended stable"
NEEDS_NORM = "Sigmoid attention needs a norm after it (annex B.1.2): with one"
GATES = "Gating tolerates learning rates 30 % higher (annex D.7)"


def claims(study: Study, shortfalls: Mapping[str, str]) -> list[Claim]:
    """Return the claims on every group's series.

    ``shortfalls``: reason for too little learning by series, "" for a trained one.
    """
    return [claim for group in groups(study) for claim in _judge_group(study, group, shortfalls)]


def _judge_group(study: Study, group: tuple[str, ...], shortfalls: Mapping[str, str]) -> Iterator[Claim]:
    """Yield one group's claims: sigmoid with and without norm, gates against `sa`, recurrent mixers."""
    rows = {series: study.of(series).iloc[0] for series in group}
    plain = next(series for series, row in rows.items() if (row["mechanism"], row["variant"]) == (PLAIN, ""))
    for other, without in _pair_by_norm([(name, row) for name, row in rows.items() if row["mechanism"] == "sigmoid"]):
        if lacking := _lacking(study, (other, without), shortfalls, f"{NEEDS_NORM}, larger rates are stable"):
            yield lacking
            continue
        yield _edge_claim(study, f"{NEEDS_NORM}, larger rates are stable", (other, without), BY_NLL, 1.0)
        measure, pair = measures_of(study)[0], Pair(without, other, ("sigmoid with a norm", "sigmoid"))
        lower = f"{NEEDS_NORM}, the best NLL is lower"
        yield best_claim(study, f"best NLL {other}", measure, pair, lower, paper=TOOLKIT)
    for gated in (name for name, row in rows.items() if row["mechanism"] == "gated_softmax"):
        if lacking := _lacking(study, (gated, plain), shortfalls, f"{GATES}: {gated}"):
            yield lacking
            continue
        for said in (BY_NLL, BY_VERDICT):
            yield _edge_claim(study, f"{GATES}: {said}, {gated}", (gated, plain), said, HIGHER_BY_GATES)
    by_mechanism = {row["mechanism"]: series for series, row in rows.items() if not row["variant"]}
    yield from _language_claims(study, by_mechanism, shortfalls)


def _language_claims(study: Study, by_mechanism: Mapping[str, str], shortfalls: Mapping[str, str]) -> Iterator[Claim]:
    """Yield the claims on the lower NLL of two mixers, for causal studies only.

    The annexes describe causal models. ``by_mechanism``: each mechanism's base series.
    """
    if wording.words(study).direction != CAUSAL:
        return
    measure = measures_of(study)[0]
    for better, others, said in LOWER_NLL:
        for worse in (name for name in others if {better, name} <= by_mechanism.keys()):
            other, plain = by_mechanism[better], by_mechanism[worse]
            statement = f"{said} {worse}"
            lacking, pair = _lacking(study, (other, plain), shortfalls, statement), Pair(plain, other, (better, worse))
            subject = f"best NLL {other} beside {plain}"
            yield lacking or best_claim(study, subject, measure, pair, statement, paper=TOOLKIT)


def _pair_by_norm(sigmoids: list[tuple[str, Mapping[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield pairs (with norm, without) from an ablation of ``norm`` on sigmoid attention."""
    base = next((name for name, row in sigmoids if not row["variant"]), None)
    for name, row in sigmoids:
        setting, _, value = row["variant"].partition("=")
        if setting == "norm" and base is not None:
            yield (base, name) if value == "none" else (name, base)


def _lacking(study: Study, pair: tuple[str, str], shortfalls: Mapping[str, str], statement: str) -> Claim | None:
    """Return a "not judged" claim if either series learned too little or has no result, else None."""
    other, plain = pair
    if not (few := [name for name in (plain, other) if shortfalls[name]]):
        return None
    return decline_pair(f"trained {other}", statement, (other, plain), say_lacking(study, few), TOOLKIT)


class _Edges(NamedTuple):
    """One series' edges by seed: bounds, and the rates between which they lie without interpolation."""

    bounds: dict[int, Bounds]
    brackets: dict[int, Bounds]


def _edges_by_nll(study: Study, found: SeriesWindows) -> _Edges:
    return _Edges(edge_by_nll(study, found), bracket_by_nll(found))


def _edge_claim(study: Study, statement: str, pair: tuple[str, str], said: str, factor: float) -> Claim:
    """Judge whether the first series is stable up to ``factor`` times the second's largest rate.

    ``said``: the edge's definition, `BY_NLL` or `BY_VERDICT`. A verdict by NLL needs the edge at an equal share of what
    was learned, too.
    """
    if said == BY_VERDICT:
        known = [edge_by_verdict(study, name) for name in pair]
        return word_claim(_compare_edges(statement, pair, said, factor, [_Edges(each, each) for each in known]))
    sides = [_edges_by_nll(study, windows(study)[name]) for name in pair]
    claim, equal = _compare_edges(statement, pair, said, factor, sides), equal_share(study, *pair)
    if equal is None:
        return word_claim(claim)
    second = _compare_edges(statement, pair, said, factor, [_edges_by_nll(study, equal.found), sides[1]])
    note = f"At an equal share of what was learned ({100 * equal.share:.0f} %): {second.effect} ({second.interval})."
    claim = require_both(claim, second)
    return word_claim(replace(claim, note=f"{note} {claim.note}".strip()) if claim.n > 1 else claim)


def _compare_edges(statement: str, pair: tuple[str, str], said: str, factor: float, sides: Sequence[_Edges]) -> Claim:
    """Return the claim on one definition of the edges, without its text.

    Seeds in which both diverged everywhere are left out. A factor of 1 requires more than `TIE_DECADES`.

    Args:
        statement: the claim in its own terms.
        pair: names of both series.
        said: the edge's definition.
        factor: the claimed ratio.
        sides: both series' edges.
    """
    other, plain = pair
    own, base = (side.bounds for side in sides)
    seeds = [seed for seed in sorted(own.keys() & base.keys()) if math.isfinite(max(own[seed][0], base[seed][0]))]
    needed = math.log10(factor)
    lows = [own[seed][0] - base[seed][1] - needed for seed in seeds]
    highs = [own[seed][1] - base[seed][0] - needed for seed in seeds]
    subject, n = f"edge {other} beside {plain}", len(seeds)
    tie = TIE_DECADES if factor == 1.0 else 0.0
    direction, interval, lost = decide_with_lost(lows, highs, tie)
    known = say_span([end + needed for end in interval])
    kind = "range" if n == 2 or lost else "95 %"
    typical = np.median if lost else np.mean  # the interval is the mean's, but where a seed has no rate at all
    least, most = (float(typical([end + needed for end in ends])) if ends else math.nan for ends in (lows, highs))
    effect = _times(least) if most - least < TIE_DECADES else say_span((least, most))
    verdict = judge_sign(direction)
    more_runs, is_resolved = None, True
    if direction and not lost:
        is_resolved, more_runs = _resolve([side.brackets for side in sides], seeds, needed, lows, highs)
    verdict = verdict if is_resolved else "unresolved"
    asked = f", {factor:g} times is claimed" if factor != 1.0 else ""
    medians = f"{_median(own, seeds)} against {_median(base, seeds)}" if seeds else "no seed has both"
    note = f"In {plural(lost, 'seed')} one of the two has none at all." if lost else ""
    return Claim(
        subject,
        "no claim" if n < 2 else verdict,
        statement=statement,
        n=n,
        effect=effect if seeds else "",
        interval=f"{kind}: {known}" if n > 1 else "",
        paper=TOOLKIT,
        finding=f"largest stable learning rate of {other} over {plain}'s{asked} ({said}): {medians}",
        note=note,
        test=("edge", said, f"{factor:g}", other, plain),
        p=(p_of_agreement if lost else p_of_bounds)(lows, highs, tie),
        differences=tuple(lows) if lows == highs else (),
        more_runs=more_runs,
    )


def _resolve(
    brackets: list[dict[int, Bounds]], seeds: list[int], needed: float, lows: list[float], highs: list[float]
) -> tuple[bool, int | None]:
    """Return whether the edges' brackets exclude a difference of 0, else the runs needed for it."""
    (first, second), sign = brackets, 1 if sum(lows) + sum(highs) > 0 else -1
    ends = [(first[seed][0] - second[seed][1] - needed, first[seed][1] - second[seed][0] - needed) for seed in seeds]
    least = float(np.mean([low for low, _ in ends])) if sign > 0 else -float(np.mean([high for _, high in ends]))
    if least >= -1e-9:
        return True, None
    gaps = [float(np.median([each[seed][1] - each[seed][0] for seed in seeds])) for each in brackets]
    size = abs(float(np.mean([low + high for low, high in zip(lows, highs, strict=True)]))) / 2
    more = bisections_needed([gap for gap in gaps if math.isfinite(gap)], size)
    return False, None if more is None else more * len(seeds)


def say_span(ends: Sequence[float]) -> str:
    """Return two ratios, given in decades, as text; "any ratio" from 0 to ∞, as if no rate swept is too large."""
    low, high = ends
    return "any ratio" if low == -math.inf and high == math.inf else f"{_times(low)} to {_times(high)}"


def _times(decades: float) -> str:
    """Return a learning-rate ratio as text: ×1.32, ×∞, ×0."""
    return "×∞" if decades == math.inf else f"×{10**decades:.2f}" if math.isfinite(decades) else "×0"


def _median(edges: Mapping[int, tuple[float, float]], seeds: list[int]) -> str:
    """Return the median over seeds of the edges' lower bounds, as a learning rate."""
    middle = float(np.median([edges[seed][0] for seed in seeds]))
    return lr_text(float(f"{10**middle:.3g}")) if math.isfinite(middle) else "none"


def _say_few(study: Study, few: Mapping[str, str]) -> str:
    said = say_lacking(study, few)
    return sentence(said) if said.startswith("of ") else said  # a name keeps its first letter


def reading(study: Study) -> list[str]:
    """Return the sentences on each group of mechanisms; [] if the study compares none."""
    found, lacking = groups(study), reasons_untrained(study)
    texts = []
    for group in found:
        ordered = list(numbers_of(study, group).values())
        few = {each.series: each.name for each in ordered if lacking[each.series]}
        own = [divergences(ordered), best(ordered, "mechanism"), f"{_say_few(study, few)}." if few else ""]
        prefix = f"{common_of(study, group)}: " if len(found) > 1 else ""
        texts += [prefix + text for text in own if text]
    return texts
