"""Judge whether the routing of experts collapses at a lower learning rate than the loss."""

from __future__ import annotations

import math

from analysis.claims.claim import Claim, interval_text, signed, verdict_of, word_claim
from analysis.numbers.comparison import Comparison
from analysis.numbers.routing import compare_collapse
from analysis.study.load import Study

STATEMENT = "routing collapses before the loss does"


def collapse_claim(study: Study, series: str) -> Claim:
    """Return the claim on one series with a router, judged over seeds."""
    result = compare_collapse(study, series)
    return word_claim(
        Claim(
            f"routing {series}",
            verdict_of(result),
            statement=f"{series}: {STATEMENT}",
            n=result.n,
            effect=_effect(result),
            interval=interval_text(result.interval, result.n, "decades"),
            finding=f"{series}: {_finding(result)}",
            differences=result.differences,
            more_runs=result.more_runs,
        )
    )


def _effect(result: Comparison) -> str:
    low, high = result.size
    if low == high:
        return f"{signed(low)} decades"
    return f"{'≤ ' if math.isinf(low) else '≥ '}{signed(high if math.isinf(low) else low)} decades"


def _finding(result: Comparison) -> str:
    low, high = result.size
    if math.isinf(low) and math.isinf(high):
        return "neither routing nor loss has an edge among the swept rates of every seed"
    if math.isinf(low):
        return (
            f"some seed’s routing collapses at no swept rate; the loss is lost at least {abs(high):.2f} decades below"
        )
    if math.isinf(high):
        return f"some seed’s loss is lost at no swept rate; routing collapses at least {abs(low):.2f} decades below"
    side = "below" if low + high > 0 else "above"
    return f"routing collapses {abs(low + high) / 2:.2f} decades {side} the learning rate that loses the loss"
