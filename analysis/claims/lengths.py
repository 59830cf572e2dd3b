"""Judge whether a text longer than in training is predicted better than in pieces of the trained length.

A model that reads positions beyond those of training gains from the longer context; one that does not has a higher NLL.
Each series is judged at its best learning rate; seeds are the sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from analysis.claims.claim import Claim, decline, judge_mean, signed
from analysis.numbers.windows import windows
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.words import lr_text

NAME = "lengths"


@once_per_study
def read_best(study: Study) -> Frame:
    """Return the rows of finished runs at the best learning rate of their series."""
    rows = study.probed_at_end(NAME)
    best = {name: found.median.best_lr for name, found in windows(study).items() if found.median is not None}
    return rows[rows["run_lr"] == rows["series"].map(best)]


def list_multiples(study: Study) -> list[int]:
    """Return the measured lengths, in multiples of the trained one."""
    return sorted({int(each) for each in study.probes[NAME]["multiple"]})


def claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each series and length; none without a probe."""
    if NAME not in study.probes:
        return
    best = read_best(study)
    for series in study.series:
        for multiple in list_multiples(study):
            rows = best[(best["series"] == series) & (best["multiple"] == multiple)]
            if len(rows):
                yield _judge(series, multiple, rows.sort_values("seed"))


def _judge(series: str, multiple: int, rows: Frame) -> Claim:
    """Return the claim on one series and length."""
    statement = f"{series} predicts a text of {multiple} times the trained length better than in pieces of that length"
    subject, values = f"{NAME} {series} {multiple}", rows["difference"].tolist()
    if not all(map(math.isfinite, values)):
        limit = rows["limit"].iloc[0]
        why = "the NLL of a run is not finite" if math.isnan(limit) else f"it has {limit:.0f} positions"
        return decline(subject, statement, why)
    mean = math.fsum(values) / len(values)
    claim = Claim(
        subject,
        "no claim",
        statement=statement,
        effect=f"{signed(mean, 3)} nats",
        finding=f"{series}: text of {multiple} times the trained length, at {lr_text(rows['run_lr'].iloc[0])}, changes "
        f"the NLL by {signed(mean, 3)} nats",
        test=(NAME, series, str(multiple)),
    )
    return judge_mean(claim, values, -1, "nats", 3)
