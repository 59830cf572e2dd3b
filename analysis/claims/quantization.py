"""Judge two claims of Catalan-Tatjer, Ajroldi and Geiping (arXiv:2510.06213) on a study's rounded weights.

A model trained at a larger learning rate loses less by rounding; and the decay of the rate makes the loss larger. Seeds
are the sample; every number of bits and series is a comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from analysis.claims.claim import Claim, Verdict, bounds, interval_text, signed, word_claim
from analysis.numbers.quantization import NAME, Compared, compare_decay, compare_rates, list_bits
from analysis.numbers.significance import LEVEL, p_beyond
from analysis.numbers.spread import mean_interval
from analysis.study.load import Study
from analysis.words import join_words, lr_text

PAPER = "Training Dynamics Impact Post-Training Quantization Robustness"
MOST_BITS = 4  # beyond, rounding hardly changes the NLL


def claims(study: Study) -> list[Claim]:
    """Return both claims for each series and at most `MOST_BITS` bits; [] without a probe."""
    return list(_claims(study)) if NAME in study.probes else []


def _claims(study: Study) -> Iterator[Claim]:
    for series in study.series:
        for bits in (each for each in list_bits(study) if each <= MOST_BITS):
            yield _judge(compare_rates(study, series, bits), "rate", _word_rates)
    if not (study.probes[NAME]["phase"] == "before_decay").any():
        return
    for series in study.series:
        for bits in (each for each in list_bits(study) if each <= MOST_BITS):
            yield _judge(compare_decay(study, series, bits), "decay", _word_decay)


def _judge(found: Compared, kind: str, word: Callable[[float], tuple[str, str, int]]) -> Claim:
    """Return the claim on one comparison; its finding is worded from the mean over seeds."""
    what = {"rate": "a larger learning rate quantises better", "decay": "the decay makes quantisation worse"}[kind]
    statement = f"{found.series}, {found.bits} bits: {what}"
    subject = f"quantization {kind} {found.series} {found.bits}"
    if found.why_not:
        text = f"{statement}: not judged, since {found.why_not}."
        return Claim(subject, "not judged", text, statement, paper=PAPER)
    number = len(found.by_seed)
    mean = math.fsum(found.by_seed) / number
    finding, unit, holds_if = word(mean)
    values = [holds_if * each for each in found.by_seed]
    verdict: Verdict = "no claim"
    if number == 2 and values[0] * values[1] > 0:
        verdict = "holds" if values[0] > 0 else "contradicted"
    elif number > 2:
        p = p_beyond(values), p_beyond([-each for each in values])
        verdict = "holds" if p[0] < LEVEL else "contradicted" if p[1] < LEVEL else "undecided"
    elif number == 2:
        verdict = "undecided"
    ends = (min(found.by_seed), max(found.by_seed)) if number == 2 else mean_interval(found.by_seed)
    return word_claim(
        Claim(
            subject,
            verdict,
            statement=statement,
            n=number,
            effect=f"{signed(mean)} {unit}",
            interval=interval_text(ends, number, "decades"),
            paper=PAPER,
            finding=f"{found.series} in {found.bits} bits, {finding}",
            note=_note(found),
            test=("quantization", kind, found.series, str(found.bits)),
            p=min(p_beyond(values), p_beyond([-each for each in values])) if number > 2 else math.nan,
            differences=found.by_seed,
        )
    )


def _word_rates(mean: float) -> tuple[str, str, int]:
    """Return finding, unit and the sign that supports the claim."""
    return f"ΔNLL changes by {signed(mean)} decades with each decade of the learning rate", "decades a decade", -1


def _word_decay(mean: float) -> tuple[str, str, int]:
    return f"ΔNLL after the decay is {10**mean:.2f} times that before", "decades", 1


def _note(found: Compared) -> str:
    """Return the rates behind a comparison, and the number from those near the best NLL alone."""
    near = (
        f" At the rates within 5 % of the best NLL alone: {signed(math.fsum(found.near) / len(found.near))} decades "
        f"({bounds(mean_interval(found.near))})."
        if len(found.near) > 1
        else ""
    )
    return f"Learning rates {join_words(map(lr_text, found.rates))}.{near}"
