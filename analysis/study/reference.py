"""Find the references of a series: one that differs in one axis, and the loss of a model that learned nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.study import multiples, wording
from analysis.study.load import Frame, Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study
from stability.primary import PLAIN

# settings of `objective=sentence_pairs` under which a loss has another unit
OF_LOSS = ("loss", "temperature", "margin")


@once_per_study
def references(study: Study) -> dict[str, str]:
    """Return the reference of each series; a series without one is left out.

    Of another mechanism, or with an ablated setting: the reference mechanism with otherwise equal settings, the ablated
    one included where it has it; else the base of the ablation. Of the reference mechanism itself: the plain residual
    scheme, then the plain norm. Data are never compared, since their NLLs have different units; nor are variants of
    the loss itself; nor are optimizers, but as a variant with its base's reference rate.
    """
    if study.is_search:
        return {}
    found = {series: _reference(study, series) for series in study.series}
    return {series: name for series, name in found.items() if name is not None and name != series}


def reference_series(study: Study) -> str:
    """Return the first series of the reference's mechanism: ``sa+ca`` of ``sa``."""
    return next(name for name in study.series if study.of(name)["mechanism"].iloc[0] == study.reference)


def _reference(study: Study, series: str) -> str | None:
    row = study.of(series).iloc[0]
    if _has_own_loss(study, row["variant"]):
        return None
    if row["mechanism"] != study.reference or row["variant"]:
        to_reference = {"mechanism": study.reference}
        name = _same_but(study, row, to_reference) if row["mechanism"] != study.reference else None
        name = name or _same_but(study, row, to_reference | {"variant": ""})
        return name or (row["base"] if row["base"] in study.series and _has_rates_of_base(study, row) else None)
    for axis, plain in PLAIN.items():
        if row[axis] != plain and (name := _same_but(study, row, {axis: plain})):
            return name
    return None


def _has_rates_of_base(study: Study, row) -> bool:
    """Return whether a run's optimizer has the reference rate of its base's."""
    rates = multiples.references(study.study)
    base = str(study.of(row["base"]).iloc[0]["optimizer"])
    return base == row["optimizer"] or rates.get(base, 0.0) == rates.get(row["optimizer"])


def _same_but(study: Study, row, changed: dict[str, str]) -> str | None:
    """Return the first series equal to a run except for the changed axes, or None."""
    axes = [axis for axis in ("mechanism", *SETTING_AXES) if axis != "cross"]
    wanted = {axis: changed.get(axis, row[axis]) for axis in axes}
    base = study.runs.drop_duplicates("series")
    names = set(base.loc[(base[axes] == wanted).all(axis=1), "series"])
    return next((name for name in study.series if name in names), None)


def changes_loss(ablation: Mapping[str, Any]) -> bool:
    """Return whether an ablation of a study's record varies the loss itself, so that its values do not compare."""
    return ablation["part"] == "objective" and ablation["setting"] in OF_LOSS


def compares_losses(study: Study) -> bool:
    """Return whether the series have losses of different units, which no common axis compares."""
    return any(_has_own_loss(study, variant) for variant in set(study.runs["variant"]))


def name_loss(study: Study, series: str) -> str:
    """Return the variant of the loss that a series is trained by, "" for the study's own; only equal ones compare."""
    variant = str(study.of(series).iloc[0]["variant"])
    return variant if _has_own_loss(study, variant) else ""


def _has_own_loss(study: Study, variant: str) -> bool:
    """Return whether a variant's setting changes the loss itself."""
    ablations = [item for item in study.study.get("ablations") or [] if changes_loss(item)]
    return bool(variant) and any(value["variant"] == variant for item in ablations for value in item["values"])


@dataclass(frozen=True)
class Unlearned:
    """A loss without learning, and its terms.

    Attributes:
        nll: the loss, median over a series' runs; NaN if not recorded.
        name: the models that reach it, in the plural.
        nll_name: their loss.
    """

    nll: float
    name: str
    nll_name: str


def frequency_nll(runs: Frame) -> float:
    """Return the NLL of the targets' frequencies, median over runs; NaN if not recorded."""
    return float(runs["unigram_nll"].median())


@once_per_study
def unlearned(study: Study, series: str) -> Unlearned:
    """Return the loss of a series without learning.

    An NLL's is that of the targets' frequencies. A loss without a unit of nats has no such model: an untrained encoder
    of sentences is already better than equal embeddings by some losses, and worse by others. The lower one counts.
    """
    runs, words = study.of(series), wording.words(study)
    baseline = Unlearned(frequency_nll(runs), words.baseline, words.baseline_nll)
    start = float(runs["init_nll"].median())
    if words.in_nats or math.isnan(start) or start >= baseline.nll:
        return baseline
    return Unlearned(start, "the untrained models", "loss of the untrained models")
