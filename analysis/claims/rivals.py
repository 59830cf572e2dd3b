"""Compare each scheme with its paper's baseline: best NLL, accuracy, stable window.

Comparisons are made seed by seed under the rules in `analysis.claims.judging`. Claims from `analysis.claims.residuals`
and `streams` follow. Residual schemes are compared with the plain one, mHC-lite also with mHC and HC. AttentionX is
compared with attention under the same mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from analysis.claims import residuals as residual_claims
from analysis.claims.claim import Claim, Verdict, weight
from analysis.claims.pairs import (
    FURTHER,
    RIVALS,
    Measure,
    Pair,
    alike,
    compared,
    compares_mechanisms,
    compares_residuals,
    pairs_of,
)
from analysis.claims.streams import mixing_claims
from analysis.drawing.tables import width_text
from analysis.numbers.comparison import Comparison, compare_windows, decide, diverged_everywhere
from analysis.numbers.mixers import compares_mixers
from analysis.numbers.optimizers import compares_optimizers
from analysis.numbers.windows import SeriesWindows, by_rate_and_seed, compares_recall
from analysis.study.load import FINISHED, Frame, Study
from analysis.words import listed, plural

# our margin for "on par": the paper gives none, and Table 1's numbers are not in the text at hand
PAR_NATS = 0.01
MIXERS_OF_THE_PAPERS = "what the annexes say was seen in language models of a billion parameters and more"
RECALL_OF_THE_PAPERS = (
    "associative recall was posed to models of width 64 to 512, of 8,192 tokens in 100,000 sequences of 64 to 512 "
    "(Arora et al. 2023)"
)
LOWER_NORM = "mHC-lite's gradient norm is slightly lower than mHC's (4.1, Figure 2)"
SAME_MASK = "attention's of the same mask"
STATEMENTS = {
    ("mhc_lite", "mhc", "NLL"): "mHC-lite's loss is on par with mHC's or lower (4.1, Table 1)",
    ("attentionx", "sa", "NLL"): f"AttentionX's validation loss is lower than {SAME_MASK} (4.2, Figure 1)",
    ("attentionx", "sa", "accuracy"): f"AttentionX's validation accuracy is higher than {SAME_MASK} (4.1, Table 1)",
}


def another_question(study: Study) -> bool:
    """Return whether a study without consensus runs tests other claims than the consensus paper's."""
    others = compares_optimizers(study) or compares_mixers(study) or compares_recall(study)
    return compares_schemes(study) or ("sc" not in set(study.runs["mechanism"]) and others)


def compares_schemes(study: Study) -> bool:
    """Return whether a study without consensus runs compares residual schemes or rival mechanisms."""
    return "sc" not in set(study.runs["mechanism"]) and (compares_residuals(study) or compares_mechanisms(study))


def scale_of_the_papers(study: Study) -> str:
    """Describe the scale in the papers relevant to the study."""
    if not another_question(study):
        return "the paper's models have 35 to 385 million parameters"
    papers = (
        [
            "mHC-lite's models are nanoGPT's of 6 to 24 layers and width 512 to 1,024, trained in bfloat16 on 1.3 "
            "billion tokens of OpenWebText and FineWeb-Edu; here all is float32"
        ]
        if compares_residuals(study)
        else []
    )
    papers += ["AttentionX's are a ViT-small and GPT-2"] if compares_mechanisms(study) else []
    papers += [RECALL_OF_THE_PAPERS] if compares_recall(study) else []
    papers += [MIXERS_OF_THE_PAPERS] if compares_mixers(study) and not compares_recall(study) else []
    return "; ".join(papers) or "which optimizer is ahead after so few steps says little of other sizes and lengths"


def claims(study: Study, found: Mapping[str, SeriesWindows], shortfalls: Mapping[str, str]) -> list[Claim]:
    """Return all claims on schemes: pairwise, then throughput, gradient norms, mixing and depth.

    Each scheme is compared with the plain one at otherwise equal settings, then with those in `FURTHER`. AttentionX is
    compared with attention under the same mask, then under the other.

    Args:
        study: the study to judge.
        found: windows by series.
        shortfalls: reason for too little learning by series, "" for a trained one.
    """
    made, judged = [], set()
    for pair in pairs_of(study):
        named = f"{pair.other} beside {pair.plain}" if pair.other in judged else pair.other
        judged.add(pair.other)
        made += _about(study, pair, named, found, shortfalls)
    return [*_unmatched(study), *made, *_beyond_loss(study, found)]


def _about(
    study: Study, pair: Pair, named: str, found: Mapping[str, SeriesWindows], shortfalls: Mapping[str, str]
) -> Iterator[Claim]:
    """Yield one pair's claims on best NLL, accuracy and window."""
    if lacking := [name for name in (pair.plain, pair.other) if shortfalls[name]]:
        text = f"{pair.other} is not compared with {pair.plain}: {listed(lacking)} learned too little."
        yield Claim(f"trained {named}", "not judged", text)
        return
    for measure in compared(study):
        statement = STATEMENTS.get((*pair.names, measure.word), "") if pair.states else ""
        yield best_claim(study, f"best {measure.word} {named}", measure, pair, statement)
    verdict, text = _window(study, found[pair.other], found[pair.plain])
    seeds = found[pair.other].by_seed.keys() & found[pair.plain].by_seed.keys()
    yield Claim(f"window {named}", verdict, pair.remark + text, n=len(seeds))


def _unmatched(study: Study) -> Iterator[Claim]:
    """Yield a "not judged" for each AttentionX without same-mask attention to compare."""
    pairs = [pair for pair in pairs_of(study) if pair.names[0] in RIVALS]
    for other in dict.fromkeys(pair.other for pair in pairs):
        if any(pair.states for pair in pairs if pair.other == other):
            continue
        text = (
            f"Not judged: {other} against attention with the same mask, which this study does not hold; "
            "ablate.sa.mask_diagonal=[false,true] would judge it."
        )
        yield Claim(f"same mask {other}", "not judged", text, STATEMENTS["attentionx", "sa", "NLL"])


def _beyond_loss(study: Study, found: Mapping[str, SeriesWindows]) -> Iterator[Claim]:
    """Yield AttentionX's throughput claims, and mHC-lite's on throughput, gradient norm, mixing and depth."""
    judged = [pair for pair in pairs_of(study) if pair.names[0] in RIVALS and pair.states]
    for pair in judged:
        of_which = f": {pair.other}" if len(judged) > 1 else ""
        statement = f"AttentionX's computational overhead is negligible (3.2){of_which}"
        yield residual_claims.throughput_claim(
            study, pair.other, pair.plain, statement=statement, least=1 - residual_claims.NEGLIGIBLE_SLOWDOWN
        )
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    for _, group in alike(base, "residual"):
        schemes = {str(name): str(series) for name, series in zip(group["residual"], group["series"], strict=True)}
        if lite := schemes.get("mhc_lite"):
            for plain in (name for name in FURTHER["mhc_lite"] if name in schemes):
                title = {"mhc": "mHC", "hc": "HC"}[plain]
                faster = f"mHC-lite's throughput is higher than {title}'s without any kernel of its own (4.2, Figure 5)"
                yield residual_claims.throughput_claim(study, lite, schemes[plain], statement=faster)
                lower = LOWER_NORM if plain == "mhc" else ""
                yield residual_claims.gradient_norm_claim(study, lite, schemes[plain], statement=lower)
        if {"mhc", "mhc_lite", "hc"} & schemes.keys():
            yield from mixing_claims(study, schemes, dict(found))


def best_claim(study: Study, about: str, measure: Measure, pair: Pair, statement: str) -> Claim:
    """Judge a pair by each seed's best value over common learning rates.

    A seed with diverged runs only has an infinitely bad best.

    Args:
        study: supplies the runs.
        about: subject of the claim.
        measure: compared number.
        pair: both series.
        statement: the paper's claim; "on par" in it selects the test with margin `PAR_NATS`.
    """
    column, better, word, digits, limit = measure
    other, plain = pair.other, pair.plain
    tables = [_outcomes(study.of(name), column, -better * math.inf) for name in (other, plain)]
    rates, seeds = (
        sorted(set(getattr(tables[0], axis)) & set(getattr(tables[1], axis))) for axis in ("index", "columns")
    )
    bests = [(better * table.loc[rates, seeds]).max(axis=0) * better for table in tables]
    pairs = [
        (a, b)
        for a, b in zip(*bests, strict=True)
        if not (math.isnan(a) or math.isnan(b) or math.isinf(a) and math.isinf(b))
    ]
    differences = [a - b for a, b in pairs]
    numbers = (
        "medians: " + " against ".join(f"{median:{digits}}" for median in np.median(pairs, axis=0))
        if pairs
        else "no seed has both"
    )
    effect = f"{np.median(differences):+{digits}}".replace("-", "−") if pairs else ""
    judged = partial(Claim, about, statement=statement, n=len(pairs), effect=effect)
    if len(pairs) < 2:
        text = f"On the best {word} of {other} and {plain}, no claim is made with {plural(len(pairs), 'seed')}"
        return judged("no claim", f"{pair.remark}{text} ({numbers}).")
    direction, (low, high) = decide(differences, differences)
    # differences between shares cannot exceed the limit, so clipping does not change the interval's coverage
    low, high = max(low, -limit), min(high, limit)
    known = " to ".join(f"{bound:+{digits}}".replace("-", "−") for bound in (low, high))
    numbers += (
        f"; paired difference {known}, "
        f"n={len(pairs)}{', 95 % interval' if len(pairs) > 2 else ''}{_lost(pairs, other, plain)}"
    )
    wanted = "lower" if better < 0 else "higher"
    interval = f"{known}, {'range' if len(pairs) < 3 else '95 % interval of the mean paired difference'}"
    if "on par" in statement:
        verdict, text = _on_par(low, high, other, plain, weight(len(pairs)))
    elif direction == 0:
        verdict, text = "undecided", f"Whether {other} reaches a {wanted} {word} than {plain} at its best rate stays"
        text += " undecided"
    else:
        relation = "lower" if direction < 0 else "higher"
        verdict = "holds" if direction * better > 0 else "contradicted"
        text = f"{weight(len(pairs))} that {other} reaches a {relation} {word} than {plain}, each at its best rate"
    return judged(verdict, f"{pair.remark}{text} ({numbers}).", interval=interval)


def _on_par(low: float, high: float, other: str, plain: str, firmly: str) -> tuple[Verdict, str]:
    """Return verdict and text for "on par or lower": the interval (nats) against the margin.

    A certain difference within the margin is on par.
    """
    par = f"{other}'s NLL is on par with {plain}'s, at most {PAR_NATS:g} nats above it,"
    if high < 0:
        return "holds", f"{firmly} that {other} reaches a lower NLL than {plain}, each at its best rate"
    if high < PAR_NATS:
        return "holds", f"{firmly} that {par} each at its best rate"
    if low > PAR_NATS:
        above = f"{other}'s NLL lies more than {PAR_NATS:g} nats above {plain}'s"
        return "contradicted", f"{firmly} that {above}, each at its best rate"
    return "undecided", f"Whether {par} or lower stays undecided"


def _lost(pairs: list[tuple[float, float]], other: str, plain: str) -> str:
    """Report the seeds in which a series diverged at every rate; "" if none."""
    lost = {name: sum(math.isinf(pair[place]) for pair in pairs) for place, name in enumerate((other, plain))}
    return "".join(
        f"; {name} diverged at every rate in {count} of {plural(len(pairs), 'seed')}"
        for name, count in lost.items()
        if count
    )


def _outcomes(runs: Frame, column: str, diverged: float) -> Frame:
    """Return a table, learning rate × seed: finished values, ``diverged``, or NaN without a result."""
    value = runs[column].where(runs["status"].isin(FINISHED)).where(runs["status"] != "diverged", diverged)
    return by_rate_and_seed(runs[value.notna()], value.dropna(), "first")


def _window(study: Study, other: SeriesWindows, plain: SeriesWindows) -> tuple[Verdict, str]:
    """Return verdict and text for a pair's windows. A seed diverged at every rate has width 0."""
    lost = diverged_everywhere(study, other.series), diverged_everywhere(study, plain.series)
    result: Comparison = compare_windows(other, plain, lost)
    widths = [
        f"{each.series} {width_text(each.median).replace('≥', 'at least')} decades"
        for each in (other, plain)
        if each.median is not None
    ]
    numbers = "; ".join(widths)
    both = f"{other.series}'s stable window is {{}} than {plain.series}'s"
    if result.n < 2:
        text = f"On the stable windows of {other.series} and {plain.series}, no claim is made with"
        return "no claim", f"{text} {plural(result.n, 'seed')} ({numbers})."
    if result.direction == 0:
        return "undecided", f"Whether {both.format('wider')} stays undecided: {result.why_undecided} ({numbers})."
    within = " within the swept range" if result.scope == "range" else ""
    relation, verdict = ("wider", "holds") if result.direction > 0 else ("narrower", "contradicted")
    return verdict, f"{weight(result.n)} that {both.format(relation)}{within} ({numbers})."
