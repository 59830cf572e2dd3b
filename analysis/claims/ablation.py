"""Judge the trends of the consensus paper's Table 9: a larger ξ, rank or window of sc lowers its validation NLL.

Each is judged from the smallest to the largest value of a study, each at its own best rate, paired by seed. Seeds are
the sample; each setting is a comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from analysis.claims.claim import CONSENSUS, Claim, decline, judge_mean, signed
from analysis.numbers.ablations import Group, ablations
from analysis.numbers.learning import LITTLE_SHARE
from analysis.study.load import Study
from analysis.study.unlearned import unlearned


def claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each setting of Table 9 with two values or more; none without an ablation of sc."""
    for each in ablations(study):
        for group in each.groups:
            if group.in_paper and group.numeric and len(group.columns) > 1:
                yield _judge(study, each.base, group)


def _judge(study: Study, base: str, group: Group) -> Claim:
    """Return the claim on one setting."""
    (low, high), values = group.ends, group.changes.tolist()
    subject, start = f"Table 9 {base} {group.setting}", unlearned(study, base)
    statement = f"a larger {group.setting} lowers {base}'s validation NLL (Table 9)"
    why = ""
    if not start.nll - min(low.median, high.median) > LITTLE_SHARE * start.nll:
        why = f"both values learned less than {100 * LITTLE_SHARE:g} % beyond {start.name}"
    elif not all(map(math.isfinite, values)):
        why = f"a run diverged at {group.setting}={(high if high.diverged else low).text}"
    if why or not values:
        return decline(subject, statement, why or "no seed has both values", CONSENSUS)
    mean = math.fsum(values) / len(values)
    claim = Claim(
        subject,
        "no claim",
        statement=statement,
        effect=f"{signed(mean, 3)} nats",
        paper=CONSENSUS,
        finding=f"{base}'s validation NLL changes by {signed(mean, 3)} nats with {group.setting} from {low.text} to "
        f"{high.text}",
        note="Each value at its own best rate." if study.runs["lr"].nunique() > 1 else "All runs have one rate.",
        test=("Table 9", base, group.setting),
    )
    return judge_mean(claim, values, -1, "nats", 3)
