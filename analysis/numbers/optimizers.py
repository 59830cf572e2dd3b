"""Compare optimizers, whose learning rates have no common unit, by numbers that have none: decades between the best
rate and the edges, α_max over the rate in force, NLL, sensitivity; and what a step is and costs
(`analysis.numbers.kinds`)."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.numbers import kinds
from analysis.numbers.kinds import Numbers
from analysis.study import multiples
from analysis.study.load import Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study

PLAIN = "adamw"  # what the others are compared with, where it is there


def compares_optimizers(study: Study) -> bool:
    return bool(groups(study))


def compares_optimizers_alone(study: Study) -> bool:
    """Return whether the series of a study differ in nothing but their optimizer."""
    return groups(study) == [study.series]


def groups(study: Study) -> list[tuple[str, ...]]:
    """Return the series that differ in their optimizer alone, group by group, in the study's order; variants of an
    ablation are left to its own tables."""
    if study.is_search:
        return []
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    alike = ["mechanism", *(axis for axis in SETTING_AXES if axis not in ("optimizer", "variant"))]
    found = [set(group["series"]) for _, group in base.groupby(alike, sort=False) if group["optimizer"].nunique() > 1]
    return [tuple(name for name in study.series if name in own) for own in found]


def others_of(study: Study, group: tuple[str, ...]) -> str:
    """Name what the series of a group have in common: a series' name without the optimizer's."""
    runs = study.of(group[0])
    return " ".join(word for word in group[0].split(" ") if word != runs["optimizer"].iloc[0])


def plain_of(numbers: Mapping[str, Numbers]) -> Numbers:
    """Return what the others of a group are compared with: AdamW, or the first where it is not among them."""
    return next((each for each in numbers.values() if each.name == PLAIN), next(iter(numbers.values())))


@once_per_study
def numbers_of(study: Study, group: tuple[str, ...]) -> dict[str, Numbers]:
    """Return the numbers of each series of a group, under its optimizer's name."""
    names = {series: str(study.of(series)["optimizer"].iloc[0]) for series in group}
    return kinds.numbers_of(study, names, multiples.references(study.study))


def reference_of(study: Study, optimizer: str) -> float:
    """Return an optimizer's reference rate; 1 where the study's record does not have it."""
    return multiples.references(study.study).get(optimizer, 1.0)
