"""Judge whether a signal from inside the training step warns of a break before the training loss does.

The sample are groups of runs with one mechanism, settings and seed. A signal that often gives alarm would win by
accident, so leads are earned ones (`analysis.numbers.alarms`): less those of as many false alarms. Every signal is a
comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math

from analysis.claims.claim import Claim, Verdict, interval_text, signed, word_claim
from analysis.numbers.alarms import EarnedLeads, compare_leads
from analysis.numbers.significance import LEVEL, p_beyond
from analysis.numbers.spread import mean_interval
from analysis.study.load import Study
from analysis.words import plural

LOGS = ("activations", "edge")


def claims(study: Study) -> list[Claim]:
    """Return the claim on each signal; [] without their logs."""
    if study.is_search or not any(len(study.signals.get(log, ())) for log in LOGS):
        return []
    return [_judge(found) for found in compare_leads(study)]


def _judge(found: EarnedLeads) -> Claim:
    statement = f"the {found.signal.name} warns of a break before the training loss does"
    subject = f"signal {found.signal.name}"
    if found.why_not:
        return Claim(subject, "not judged", f"{statement}: not judged, since {found.why_not}.", statement)
    values, number = found.by_unit, len(found.by_unit)
    mean = math.fsum(values) / number
    sides = p_beyond(values), p_beyond([-each for each in values])
    verdict: Verdict = "no claim"
    if number == 2:
        verdict = "undecided" if values[0] * values[1] <= 0 else "holds" if mean > 0 else "contradicted"
    elif number > 2:
        verdict = "holds" if sides[0] < LEVEL else "contradicted" if sides[1] < LEVEL else "undecided"
    interval = (min(values), max(values)) if number == 2 else mean_interval(values)
    return word_claim(
        Claim(
            subject,
            verdict,
            statement=statement,
            n=number,
            effect=f"{signed(mean, 1)} steps",
            interval=interval_text(interval, number, "steps", 1),
            finding=f"the {found.signal.name} warns {abs(mean):.1f} steps {'before' if mean > 0 else 'after'} the loss "
            "does, less what false alarms would gain",
            note=f"n: groups with one mechanism, settings and seed, of {plural(found.runs, 'broken run')}.",
            test=("signal", found.signal.name),
            p=min(sides) if number > 2 else math.nan,
        )
    )
