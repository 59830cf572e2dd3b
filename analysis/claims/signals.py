"""Judge whether a signal from inside the training step warns of a break before the training loss does.

The sample are groups of runs with one mechanism, settings and seed. A signal that often gives alarm would win by
accident, so leads count less those by chance (`analysis.numbers.alarms`). Few runs may hold at the rates of broken
ones, so their mean is uncertain, too: Welch's t. Every signal is a comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math

from analysis.claims.claim import Claim, decline, interval_text, signed, word_claim
from analysis.numbers.alarms import EarnedLeads, compare_leads
from analysis.numbers.spread import LEVEL, compare_means
from analysis.study.load import Study
from analysis.words import plural

LOGS = ("activations", "edge")
TEST = "signal"


def claims(study: Study) -> list[Claim]:
    """Return the claim on each signal; [] without their logs."""
    if study.is_search or not any(len(study.signals.get(log, ())) for log in LOGS):
        return []
    return [_judge(found) for found in compare_leads(study)]


def _judge(found: EarnedLeads) -> Claim:
    statement = f"the {found.signal.name} warns of a break before the training loss does"
    subject = f"signal {found.signal.name}"
    if found.why_not:
        return decline(subject, statement, found.why_not)
    number, verdict = len(found.by_unit), "no claim"
    by_chance = math.fsum(found.by_chance) / len(found.by_chance)
    earned = [value - by_chance for value in found.by_unit]
    mean, interval, p = math.fsum(earned) / number, (min(earned), max(earned)), math.nan
    if number == 2:
        verdict = "undecided" if earned[0] * earned[1] <= 0 else "holds" if mean > 0 else "contradicted"
    elif number > 2:
        mean, interval, p = compare_means(found.by_unit, found.by_chance)
        verdict = "undecided" if p > LEVEL else "holds" if mean > 0 else "contradicted"
    return word_claim(
        Claim(
            subject,
            verdict,
            statement=statement,
            n=number,
            effect=f"{signed(mean, 1)} steps",
            interval=interval_text(interval, number, "steps", 1),
            finding=f"the {found.signal.name}'s lead before a break is {abs(mean):.1f} steps "
            f"{'longer' if mean > 0 else 'shorter'} than the loss's, less the lead by chance",
            note=f"It warned of {found.warned} and the loss of {found.loss_warned} of "
            f"{plural(found.runs, 'broken run')}. n: groups of these with one mechanism, settings and seed.",
            test=(TEST, found.signal.name),
            p=p,
        )
    )
