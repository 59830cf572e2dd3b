"""Find the pairs of series for a claim: equal except for the named axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study
from analysis.study.wording import sees_itself

UNKNOWN = "The study's record does not say whether both have the same mask."
PLAIN = "identity"
RIVALS = {"attentionx": "sa"}  # mechanism: baseline in its paper
FURTHER = {"mhc_lite": ("mhc", "hc")}  # residual scheme: its paper's baselines besides the plain one


class Measure(NamedTuple):
    """A number for comparing a pair's best runs.

    Attributes:
        column: column in ``study.runs``.
        better: 1 if more is better, −1 if less is.
        word: its name in sentences.
        digits: format specification.
        limit: largest possible difference.
        is_share: whether it is a fraction, printed in per cent and its differences in points.
    """

    column: str
    better: int
    word: str
    digits: str
    limit: float = math.inf
    is_share: bool = False

    @property
    def factor(self) -> int:
        """The printed number of the column's 1."""
        return 100 if self.is_share else 1


def find_measures(study: Study) -> list[Measure]:
    """Return the study's measures: the NLL, and the objective's validated share if recorded."""
    share = wording.words(study).share
    measures = [Measure("val_nll", -1, "NLL", ".3f")]
    measures += [] if share is None else [Measure(share.column, 1, share.name, ".2f", limit=1.0, is_share=True)]
    return [each for each in measures if each.column in study.runs and study.runs[each.column].notna().any()]


class Pair(NamedTuple):
    """Two series to compare.

    Attributes:
        plain: the reference series.
        other: the compared series.
        names: both schemes' names, the other's first.
        states: whether a paper makes a claim about this pair.
        remark: a sentence on the pair.
    """

    plain: str
    other: str
    names: tuple[str, str]
    states: bool = True
    remark: str = ""


def compares_residuals(study: Study) -> bool:
    """Return whether residual schemes can be compared with the plain one or one in `FURTHER`."""
    residuals = set(study.runs["residual"])
    return (PLAIN in residuals and len(residuals) > 1) or any(
        {name, plain} <= residuals for name, others in FURTHER.items() for plain in others
    )


def compares_mechanisms(study: Study) -> bool:
    return any({name, plain} <= set(study.runs["mechanism"]) for name, plain in RIVALS.items())


@once_per_study
def pairs_of(study: Study) -> list[Pair]:
    """Return the pairs that a paper compares: residual schemes of `FURTHER`, and rival mechanisms.

    Nothing else differs between both.
    """
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    found = [Pair(*each) for each in _residual_pairs(study, base)]
    for _, group in alike(study.runs.drop_duplicates("series"), "mechanism"):
        found += _rival_pairs(study, group)
    return found


def alike(runs: Frame, axis: str):
    """Group the series' runs by everything except ``axis`` and the variant."""
    return runs.groupby(
        [each for each in ("mechanism", *SETTING_AXES) if each not in (axis, "variant")], sort=False, dropna=False
    )


def _residual_pairs(study: Study, base: Frame) -> Iterator[tuple[str, str, tuple[str, str]]]:
    for _, group in alike(base, "residual"):
        named = dict(zip(group["residual"], group["series"], strict=True))
        for other in (name for name in FURTHER if name in named):
            yield from ((named[plain], named[other], (other, plain)) for plain in FURTHER[other] if plain in named)


def _rival_pairs(study: Study, group: Frame) -> Iterator[Pair]:
    """Yield each AttentionX mask variant with each `sa`, same mask first; other masks state nothing."""
    masks = group[group["variant"].str.match(r"(mask_diagonal=\w+)?$")]
    for name, plain in RIVALS.items():
        own, beside = (masks[masks["mechanism"] == each]["series"] for each in (name, plain))
        for other in own:
            for series in sorted(beside, key=lambda series: not same_mask(study, series, other)):
                same = same_mask(study, series, other)
                yield Pair(series, other, (name, plain), same is not False, UNKNOWN if same is None else "")


def same_mask(study: Study, series: str, other: str) -> bool | None:
    """Return whether two series see or hide their own position alike.

    Args:
        study: supplies the record.
        series: name of one series.
        other: name of the other.

    Returns:
        None if not recorded.
    """
    seen = [sees_itself(study, each) for each in (series, other)]
    return None if None in seen else seen[0] == seen[1]
