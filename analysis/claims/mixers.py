"""Judge the toolkit paper's claims on mixers, and compare a study's mechanisms with `sa`.

- B.1.2: sigmoid attention needs a norm after it.
- D.7: gating tolerates learning rates 30 % higher.
- D.4.2 and D.5.2: one of two recurrent mixers, or a mixer and softmax attention, has the lower NLL. Each seed's best
  NLL decides.

The first two concern the largest stable learning rate, per seed: the rate at which the NLL leaves 5 % of the best,
interpolated between two rates. Gates are also judged by the largest rate with a stable verdict, known to one grid step.
The annexes (B.2 to B.4, D) are silent on the largest rates for recurrent mixers. Rules as in `analysis.claims.judging`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from analysis.claims.claim import Claim, weight
from analysis.claims.kinds import NLL, RATIO, SENSITIVITY, WINDOW, best, compared, divergences, rule
from analysis.claims.pairs import Pair
from analysis.claims.pairs import compared as measures_of
from analysis.claims.rivals import best_claim
from analysis.numbers.comparison import TIE_DECADES, decide
from analysis.numbers.learning import why_untrained
from analysis.numbers.mixers import (
    PLAIN,
    Edges,
    common_of,
    edge_by_nll,
    edge_by_verdict,
    groups,
    numbers_of,
    plain_of,
)
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import listed, lr_text, plural

# meaningful for trained mechanisms only: untrained ones hardly react to the rate
OF_LEARNING = (WINDOW, RATIO, SENSITIVITY)
CAUSAL = "causal"
HIGHER_BY_GATES = 1.3  # D.7, without n or an interval
# D.4.2 and D.5.2 (at 3 billion parameters): better mixer, worse mixers, claim
LOWER_NLL = (
    ("gated_deltanet", ("deltanet", "mamba2", "gla"), "Gated DeltaNet models language better (annex D.4.2) than"),
    ("hgrn2", ("mamba2", PLAIN), "HGRN2 models language slightly better (annex D.5.2, at 3B parameters) than"),
)


@dataclass(frozen=True)
class Edge:
    """A definition of the largest stable learning rate; ``said`` describes it in words."""

    find: Edges
    said: str


BY_NLL = Edge(edge_by_nll, "the rate at which the NLL leaves 5 % of the best")
BY_VERDICT = Edge(edge_by_verdict, "the largest rate that ended stable")
NEEDS_NORM = "Sigmoid attention needs a norm after it (annex B.1.2): with one"
GATES = "Gating tolerates learning rates 30 % higher (annex D.7)"


def claims(study: Study, shortfalls: Mapping[str, str]) -> list[Claim]:
    """Return the claims on every group's series.

    ``shortfalls``: reason for too little learning by series, "" for a trained one.
    """
    return [claim for group in groups(study) for claim in _of_group(study, group, shortfalls)]


def _of_group(study: Study, group: tuple[str, ...], shortfalls: Mapping[str, str]) -> Iterator[Claim]:
    """Yield one group's claims: sigmoid with and without norm, gates against `sa`, recurrent mixers."""
    rows = {series: study.of(series).iloc[0] for series in group}
    plain = next(series for series, row in rows.items() if (row["mechanism"], row["variant"]) == (PLAIN, ""))
    for other, without in _normed([(name, row) for name, row in rows.items() if row["mechanism"] == "sigmoid"]):
        if lacking := _lacking(other, without, shortfalls, f"{NEEDS_NORM}, larger rates are stable"):
            yield lacking
            continue
        yield _edge_claim(study, f"{NEEDS_NORM}, larger rates are stable", (other, without), BY_NLL, 1.0)
        measure, pair = measures_of(study)[0], Pair(without, other, ("sigmoid with a norm", "sigmoid"))
        yield best_claim(study, f"best NLL {other}", measure, pair, f"{NEEDS_NORM}, the best NLL is lower")
    for gated in (name for name, row in rows.items() if row["mechanism"] == "gated_softmax"):
        if lacking := _lacking(gated, plain, shortfalls, f"{GATES}: {gated}"):
            yield lacking
            continue
        for edge in (BY_NLL, BY_VERDICT):
            yield _edge_claim(study, f"{GATES}: {edge.said}, {gated}", (gated, plain), edge, HIGHER_BY_GATES)
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
            lacking = _lacking(other, plain, shortfalls, statement)
            yield lacking or best_claim(
                study, f"best NLL {other} beside {plain}", measure, Pair(plain, other, (better, worse)), statement
            )


def _normed(sigmoids: list[tuple[str, Mapping[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield pairs (with norm, without) from an ablation of ``norm`` on sigmoid attention."""
    base = next((name for name, row in sigmoids if not row["variant"]), None)
    for name, row in sigmoids:
        setting, _, value = row["variant"].partition("=")
        if setting == "norm" and base is not None:
            yield (base, name) if value == "none" else (name, base)


def _lacking(other: str, plain: str, shortfalls: Mapping[str, str], statement: str) -> Claim | None:
    """Return a "not judged" claim if either series learned too little, else None."""
    if not (few := [name for name in (plain, other) if shortfalls[name]]):
        return None
    text = f"{other} is not compared with {plain}: {listed(few)} learned too little."
    return Claim(f"trained {other}", "not judged", text, statement)


def _edge_claim(study: Study, statement: str, pair: tuple[str, str], edge: Edge, factor: float) -> Claim:
    """Judge whether the first series is stable up to ``factor`` times the second's largest rate.

    Seeds in which both diverged everywhere are left out. A factor of 1 requires more than `TIE_DECADES`.
    """
    other, plain = pair
    own, base = (edge.find(study, name) for name in pair)
    seeds = [seed for seed in sorted(own.keys() & base.keys()) if math.isfinite(max(own[seed][0], base[seed][0]))]
    needed = math.log10(factor)
    lows = [own[seed][0] - base[seed][1] - needed for seed in seeds]
    highs = [own[seed][1] - base[seed][0] - needed for seed in seeds]
    subject, n = f"edge {other} beside {plain}", len(seeds)
    numbers = f"{edge.said}: {_median(own, seeds)} against {_median(base, seeds)}" if seeds else "no seed has both"
    judged = partial(Claim, subject, statement=statement, n=n)
    if n < 2:
        text = f"On how far the learning rate of {other} can be pushed, no claim is made with {plural(n, 'seed')}"
        return judged("no claim", f"{text} ({numbers}).")
    direction, interval, lost = _decided(lows, highs, TIE_DECADES if factor == 1.0 else 0.0)
    known = " to ".join(_times(end + needed) for end in interval)
    kind = f"range of {n} seeds" if n == 2 or lost else "95 % interval of the mean over paired seeds"
    numbers += f"; ratio {known}, n={n}, {'range' if n == 2 or lost else '95 % interval'}"
    numbers += f"; in {plural(lost, 'seed')} one of the two has none at all" if lost else ""
    least, most = (float(np.median([end + needed for end in ends])) for ends in (lows, highs))
    effect = _times(least) if most - least < TIE_DECADES else f"{_times(least)} to {_times(most)}"
    asked = f"{factor:g} times {plain}'s" if factor != 1.0 else f"{plain}'s"
    judged = partial(judged, effect=effect, interval=f"{known}, {kind}")
    if direction == 0:
        text = f"Whether the largest stable learning rate of {other} lies above {asked} stays undecided ({numbers})."
        return judged("undecided", text)
    verdict, said = ("holds", "above") if direction > 0 else ("contradicted", "below")
    return judged(
        verdict, f"{weight(n)} that the largest stable learning rate of {other} lies {said} {asked} ({numbers})."
    )


def _decided(lows: list[float], highs: list[float], tie: float) -> tuple[int, tuple[float, float], int]:
    """Return direction, interval and the number of infinite differences, from bounds.

    An infinite difference means one side has no stable rate; then all seeds must agree.
    """
    if lost := sum(low == high and math.isinf(low) for low, high in zip(lows, highs, strict=True)):
        ends = min(lows), max(highs)
        return (1 if ends[0] > tie else -1 if ends[1] < -tie else 0), ends, lost
    return *decide(lows, highs, tie), 0


def _times(decades: float) -> str:
    """Return a learning-rate ratio as text: ×1.32, ×∞, ×0."""
    return "×∞" if decades == math.inf else f"×{10**decades:.2f}" if math.isfinite(decades) else "×0"


def _median(edges: Mapping[int, tuple[float, float]], seeds: list[int]) -> str:
    """Return the median over seeds of the edges' lower bounds, as a learning rate."""
    middle = float(np.median([edges[seed][0] for seed in seeds]))
    return lr_text(float(f"{10**middle:.3g}")) if math.isfinite(middle) else "none"


def reading(study: Study) -> list[str]:
    """Return the sentences on each group of mechanisms; [] if the study compares none."""
    found, lacking = groups(study), why_untrained(study)
    texts = []
    for group in found:
        numbers = numbers_of(study, group)
        plain, ordered = plain_of(numbers), list(numbers.values())
        few = [each for each in ordered if lacking[each.series]]
        own = [divergences(ordered), best(ordered, "mechanism"), compared(NLL, ordered, plain)]
        names = listed([each.name for each in few])
        own += [f"{names} learned too little: no window, step or sensitivity is compared with theirs."] if few else []
        trained = [each for each in ordered if each not in few]
        own += [compared(quantity, trained, plain) for quantity in OF_LEARNING] if plain in trained else []
        own = [text for text in own if text]
        prefix = f"{common_of(study, group)}: " if len(found) > 1 else ""
        texts += [prefix + text for text in (*own, rule(ordered, plain))]
    return texts
