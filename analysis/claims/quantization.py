"""Judge two claims of Catalan-Tatjer, Ajroldi and Geiping (arXiv:2510.06213) on a study's rounded weights.

A model trained at a larger learning rate loses less by rounding; and the decay of the rate makes the loss larger. Seeds
are the sample; every number of bits and series is a comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.claims.claim import Claim, bounds, decline, judge_mean, signed, verdict_words
from analysis.numbers.quantization import BEFORE, NAME, Compared, compare_decay, compare_rates, list_bits
from analysis.numbers.spread import mean_interval
from analysis.study.load import Study
from analysis.words import join_words, lr_text

PAPER = "Training Dynamics Impact Post-Training Quantization Robustness"
STATEMENTS = {"rate": "a larger learning rate quantises better", "decay": "the decay makes quantisation worse"}
MOST_BITS = 4  # beyond, rounding hardly changes the NLL


def claims(study: Study) -> Iterator[Claim]:
    """Yield both claims for each series and at most `MOST_BITS` bits; none without a probe."""
    if NAME not in study.probes:
        return
    kinds = {"rate": compare_rates, "decay": compare_decay}
    if not (study.probes[NAME]["phase"] == BEFORE).any():
        del kinds["decay"]
    for kind, compare in kinds.items():
        for series in study.series:
            for bits in (each for each in list_bits(study) if each <= MOST_BITS):
                yield _judge(compare(study, series, bits), kind)


def say_verdicts(claims: Sequence[Claim]) -> str:
    """Return one sentence with the verdicts on both claims and the clearest measurement of each; "" without a probe.

    Args:
        claims: a study's judged claims.
    """
    said = []
    for statement in STATEMENTS.values():
        own = [claim for claim in claims if claim.paper == PAPER and claim.statement.endswith(f": {statement}")]
        own.sort(key=lambda claim: (not claim.finding, math.isnan(claim.p), claim.p))  # the clearest one first
        counts = Counter(verdict_words(claim).partition(":")[0].lower() for claim in own)
        of = f"{len(own)} " if len(counts) == 1 and len(own) > 1 else ""
        verdicts = of + join_words(words if of or len(own) == 1 else f"{n} {words}" for words, n in counts.items())
        clearest = f" ({own[0].finding}, {own[0].interval})" if own and own[0].interval else ""
        said += [f"{statement}: {verdicts}{clearest}"] if own else []
    return f"Weights rounded to few bits (ΔNLL: the NLL added): {'; '.join(said)}." if said else ""


def _judge(found: Compared, kind: str) -> Claim:
    """Return the claim on one comparison; its finding is worded from the mean over seeds."""
    statement = f"{found.series}, {found.bits} bits: {STATEMENTS[kind]}"
    subject = f"quantization {kind} {found.series} {found.bits}"
    if found.why_not:
        return decline(subject, statement, found.why_not, PAPER)
    mean = math.fsum(found.by_seed) / len(found.by_seed)
    if kind == "rate":
        finding = f"ΔNLL changes by {signed(mean)} decades with each decade of the learning rate"
        unit, holds_if = "decades a decade", -1
    else:
        change = f"{signed(mean)} decades, to {10**mean:.2f} times that before"
        finding, unit, holds_if = f"the decay changes ΔNLL by {change}", "decades", 1
    claim = Claim(
        subject,
        "no claim",
        statement=statement,
        effect=f"{signed(mean)} {unit}",
        paper=PAPER,
        finding=f"{found.series} in {found.bits} bits, {finding}",
        note=_note(found),
        test=("quantization", kind, found.series, str(found.bits)),
    )
    return judge_mean(claim, found.by_seed, holds_if, "decades")


def _note(found: Compared) -> str:
    """Return the rates behind a comparison, and the number from those near the best NLL alone."""
    near = (
        f" At the rates within 5 % of the best NLL alone: {signed(math.fsum(found.near) / len(found.near))} decades "
        f"({bounds(mean_interval(found.near))})."
        if len(found.near) > 1
        else ""
    )
    return f"Learning rates {join_words(map(lr_text, found.rates))}.{near}"
