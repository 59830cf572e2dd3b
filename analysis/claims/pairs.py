"""Find the series of a study that a claim compares: those that differ in the thing named alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study
from analysis.study.wording import sees_itself

UNKNOWN = "(The study's record does not say whether both have the same mask.) "
PLAIN = "identity"
RIVALS = {"attentionx": "sa"}  # mechanisms, and what their papers compare them with
FURTHER = {"mhc_lite": ("mhc", "hc")}  # residual schemes, and what their papers compare them with beside the plain one


class Measure(NamedTuple):
    """A number by which a pair's best runs are compared. ``better``: 1 where more is, −1 where less is; ``limit``: no
    two of them can lie further apart."""

    column: str
    better: int
    word: str
    digits: str
    limit: float = math.inf


def compared(study: Study) -> list[Measure]:
    """Return what the runs of a study can be compared by: the NLL, and the share that the objective validates beside
    it."""
    share = wording.words(study).share
    measures = [Measure("val_nll", -1, "NLL", ".3f")]
    measures += [] if share is None else [Measure(share.column, 1, share.name, ".4f", limit=1.0)]
    return [each for each in measures if each.column in study.runs and study.runs[each.column].notna().any()]


class Pair(NamedTuple):
    """Two series and what tells them apart. ``remark``: begins the sentences on them; ``states``: whether a paper's
    statement is about this pair."""

    plain: str
    other: str
    names: tuple[str, str]  # of the two schemes, the other's first
    states: bool = True
    remark: str = ""


def compares_residuals(study: Study) -> bool:
    """Return whether residual schemes stand beside the plain one, or beside the one of `FURTHER`."""
    residuals = set(study.runs["residual"])
    return (PLAIN in residuals and len(residuals) > 1) or any(
        {name, plain} <= residuals for name, others in FURTHER.items() for plain in others
    )


def compares_mechanisms(study: Study) -> bool:
    return any({name, plain} <= set(study.runs["mechanism"]) for name, plain in RIVALS.items())


@once_per_study
def pairs_of(study: Study) -> list[Pair]:
    """Return the pairs of a plain series and those that differ from it in their residual alone (of `FURTHER` too), or
    in their mechanism alone where that has it for a rival."""
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    found = [
        Pair(*each)
        for plain_of in (lambda name: (PLAIN,), lambda name: FURTHER.get(name, ()))
        for each in _residual_pairs(study, base, plain_of)
    ]
    for _, group in alike(study.runs.drop_duplicates("series"), "mechanism"):
        found += _rival_pairs(study, group)
    return found


def alike(runs: Frame, axis: str):
    """Group the runs of series that differ in ``axis`` (and, of mechanisms, their variant) alone."""
    return runs.groupby(
        [each for each in ("mechanism", *SETTING_AXES) if each not in (axis, "variant")], sort=False, dropna=False
    )


def _residual_pairs(study: Study, base: Frame, plain_of) -> Iterator[tuple[str, str, tuple[str, str]]]:
    for _, group in alike(base, "residual"):
        named = dict(zip(group["residual"], group["series"], strict=True))
        for plain in named:
            others = {series: name for name, series in named.items() if name != plain and plain in plain_of(name)}
            yield from ((named[plain], series, (others[series], plain)) for series in study.series if series in others)


def _rival_pairs(study: Study, group: Frame) -> Iterator[Pair]:
    """Yield each AttentionX (as it is, or with another mask) beside each `sa`, that of the same mask first; and the two
    of one mechanism beside each other."""
    masks = group[group["variant"].str.match(r"(mask_diagonal=\w+)?$")]
    for name, plain in RIVALS.items():
        own, beside = (masks[masks["mechanism"] == each]["series"] for each in (name, plain))
        for other in own:
            ranked = sorted(beside, key=lambda series: not same_mask(study, series, other))
            for series in ranked:
                same = same_mask(study, series, other)
                remark = (
                    ""
                    if same
                    else "Mask and mechanism at once, one of the two seeing its own position and the other not: "
                    if same is False
                    else UNKNOWN
                )
                yield Pair(series, other, (name, plain), same is not False, remark)
        for mechanism, two in ((plain, beside), (name, own)):
            if len(own) and len(two) == 2:
                first, second = sorted(two, key=lambda series: sees_itself(study, series) is False)
                yield Pair(first, second, (mechanism, mechanism), False, "The mask alone: ")


def same_mask(study: Study, series: str, other: str) -> bool | None:
    """Return whether two series see or hide their own position alike; None where the study's record does not say."""
    seen = [sees_itself(study, each) for each in (series, other)]
    return None if None in seen else seen[0] == seen[1]
