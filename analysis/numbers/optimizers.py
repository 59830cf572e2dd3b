"""Compare optimizers by unit-free numbers, because their learning rates have no common unit.

These are decades from the best rate to the edges, α_max over the rate in force, NLL, sensitivity, and the size and cost
of a step (`analysis.numbers.at_best_rate`).
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.numbers import at_best_rate
from analysis.numbers.at_best_rate import Numbers
from analysis.study import multiples
from analysis.study.load import Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study

PLAIN = "adamw"  # the baseline, if present


def compares_optimizers(study: Study) -> bool:
    return bool(groups(study))


def compares_optimizers_alone(study: Study) -> bool:
    """Return whether all series of a study differ in optimizer alone."""
    return groups(study) == [study.series]


def groups(study: Study) -> list[tuple[str, ...]]:
    """Return groups of series differing in optimizer alone, in the study's order.

    Ablation variants are left to their own tables.
    """
    if study.is_search:
        return []
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    alike = ["mechanism", *(axis for axis in SETTING_AXES if axis not in ("optimizer", "variant"))]
    found = [set(group["series"]) for _, group in base.groupby(alike, sort=False) if group["optimizer"].nunique() > 1]
    return [tuple(name for name in study.series if name in own) for own in found]


def name_setting(study: Study, group: tuple[str, ...]) -> str:
    """Name a group's common settings: a series' name without the optimizer."""
    runs = study.of(group[0])
    return " ".join(word for word in group[0].split(" ") if word != runs["optimizer"].iloc[0])


def find_plain(numbers: Mapping[str, Numbers]) -> Numbers:
    """Return the group's baseline: AdamW if present, else the first."""
    return next((each for each in numbers.values() if each.name == PLAIN), next(iter(numbers.values())))


@once_per_study
def numbers_of(study: Study, group: tuple[str, ...]) -> dict[str, Numbers]:
    """Return each series' numbers by its optimizer's name."""
    names = {series: str(study.of(series)["optimizer"].iloc[0]) for series in group}
    return at_best_rate.numbers_of(study, names, multiples.references(study.study))


def reference_of(study: Study, optimizer: str) -> float:
    """Return an optimizer's reference rate; 1 if not recorded."""
    return multiples.references(study.study).get(optimizer, 1.0)
