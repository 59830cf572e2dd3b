"""Compare mechanisms with softmax attention (`sa`), each at its own best learning rate.

Uses `analysis.numbers.at_best_rate`, and finds each mechanism's largest stable rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from analysis.numbers import at_best_rate
from analysis.numbers.at_best_rate import Bounds, Numbers
from analysis.numbers.windows import SeriesWindows, outcomes
from analysis.study.load import ENDED, Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study
from analysis.words import shorten

PLAIN = "sa"
ELSEWHERE = (PLAIN, "sc", "mix", "sw", "attentionx")  # compared with it in other sections and claims
NEVER: Bounds = (-math.inf, -math.inf)  # no rate was stable


def compares_mixers(study: Study) -> bool:
    return bool(groups(study))


def groups(study: Study) -> list[tuple[str, ...]]:
    """Return groups of series differing in mechanism and its settings alone, in the study's order.

    Each contains `sa` and a mechanism not compared elsewhere.
    """
    if study.is_search:
        return []
    lines = study.runs.drop_duplicates("series")
    alike = [axis for axis in SETTING_AXES if axis not in ("variant", "cross")]
    found = [(set(group["mechanism"]), set(group["series"])) for _, group in lines.groupby(alike, sort=False)]
    compared = [names for mechanisms, names in found if PLAIN in mechanisms and not mechanisms <= set(ELSEWHERE)]
    return [tuple(name for name in study.series if name in names) for names in compared]


def common_of(study: Study, group: tuple[str, ...]) -> str:
    """Name the settings common to a group."""
    row = study.of(group[0]).iloc[0]
    return str(row["setting"]).removesuffix(shorten(str(row["variant"]))).strip()


@once_per_study
def numbers_of(study: Study, group: tuple[str, ...]) -> dict[str, Numbers]:
    """Return each series' numbers by its mechanism's name, with the varying setting."""
    return at_best_rate.numbers_of(study, {series: str(study.of(series)["label"].iloc[0]) for series in group}, {})


def find_plain(numbers: Mapping[str, Numbers]) -> Numbers:
    """Return the group's baseline: `sa` without a variant."""
    return next(each for each in numbers.values() if each.name == PLAIN)


def edge_by_nll(study: Study, own: SeriesWindows) -> dict[int, Bounds]:
    """Return bounds by seed on log10 of the upper edge of a series' windows.

    At the edge of an own window the NLL leaves 5 % of the seed's best. `NEVER` if all runs diverged. Other seeds
    without a window are left out.
    """
    table, found = outcomes(study, own.series), {}
    for seed, each in own.by_seed.items():
        if each is not None:
            found[seed] = (math.log10(each.high.lr), math.log10(each.high.furthest_lr))
        elif np.isposinf(table[seed]).all():
            found[seed] = NEVER
    return found


def bracket_by_nll(own: SeriesWindows) -> dict[int, Bounds]:
    """Return by seed log10 of the two rates between which `edge_by_nll` lies, without interpolation."""
    return {
        seed: (math.log10(each.high.inside_lr), math.log10(each.high.outside_lr))
        for seed, each in own.by_seed.items()
        if each is not None
    }


def edge_by_verdict(study: Study, series: str) -> dict[int, Bounds]:
    """Return bounds by seed on log10 of the largest rate with a stable run.

    The upper bound is the next rate, not stable, or ∞ if no higher rate was run. `NEVER` if no rate was stable; then
    all of the seed's rates must have results.
    """
    runs, found = study.of(series), {}
    for seed, own in runs.groupby("seed"):
        known = own[own["status"].isin(ENDED)]
        stable = known.loc[known["status"] == "stable", "lr"]
        if len(stable):
            above = known.loc[known["lr"] > stable.max(), "lr"]
            found[int(seed)] = (math.log10(stable.max()), math.log10(above.min()) if len(above) else math.inf)
        elif len(known) == len(own):
            found[int(seed)] = NEVER
    return found
