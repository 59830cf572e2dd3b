"""Say in words how the optimizers of a study compare, each with AdamW, or with the first where it is not there
(`analysis.claims.kinds`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from analysis.claims.kinds import NLL, RATIO, ROOM, SENSITIVITY, best, compared, divergences, rule, step_ratio
from analysis.numbers.kinds import Numbers
from analysis.numbers.optimizers import groups, numbers_of, others_of, plain_of
from analysis.numbers.side_by_side import mean_time
from analysis.study.load import Study
from analysis.words import listed

QUANTITIES = (NLL, ROOM, RATIO, SENSITIVITY)


def reading(study: Study) -> list[str]:
    """Return the sentences on each group of optimizers; [] where the study does not compare any."""
    found = groups(study)
    return [
        (f"{others_of(study, group)}: " if len(found) > 1 else "") + text
        for group in found
        for text in _of_group(study, numbers_of(study, group))
    ]


def _of_group(study: Study, numbers: Mapping[str, Numbers]) -> list[str]:
    plain, ordered = plain_of(numbers), list(numbers.values())
    texts = [divergences(ordered, "multiples of the reference"), best(ordered, "optimizer")]
    texts += [text for quantity in QUANTITIES if (text := compared(quantity, ordered, plain))]
    return [*texts, rule(ordered, plain), *_costs(study, ordered, plain)]


def _costs(study: Study, numbers: list[Numbers], plain: Numbers) -> list[str]:
    """Say which optimizers keep the least and the most, and take the shortest and the longest steps."""
    parts = []
    known = [each for each in numbers if math.isfinite(each.optimizer_bytes)]
    sized = sorted(known, key=lambda each: each.optimizer_bytes)
    if sized:
        ends = listed(dict.fromkeys(f"{each.name} {each.optimizer_bytes:.2f}" for each in (sized[0], sized[-1])))
        parts.append(f"Bytes of state a parameter, least and most: {ends}.")
    ratios = [
        mean_time(study, each.series, plain.series) if study.throughput else step_ratio(each, plain) for each in numbers
    ]
    timed = [(each, ratio) for each, ratio in zip(numbers, ratios, strict=True) if math.isfinite(ratio)]
    if len(timed) > 1:
        timed.sort(key=lambda pair: pair[1])
        ends = listed(f"{each.name} {ratio:.2f}" for each, ratio in (timed[0], timed[-1]))
        clock = "mean of turns side by side" if study.throughput else "by the runs' own clocks"
        parts.append(f"Time of a step over {plain.name}'s, shortest and longest: {ends}, {clock}.")
    return parts
