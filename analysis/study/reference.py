"""Find the series that another one is compared with: equal but for one axis."""

from __future__ import annotations

from analysis.study.load import Study
from analysis.study.naming import SETTING_AXES
from analysis.study.once import once_per_study

PLAIN = {"residual": "identity", "norm": "layernorm"}  # the parts of a plain model


@once_per_study
def references(study: Study) -> dict[str, str]:
    """Return the reference of each series; a series without one is left out.

    Of another mechanism, or with an ablated setting: the reference mechanism with otherwise equal settings, else the
    base of the ablation. Of the reference mechanism itself: the plain residual scheme, then the plain norm. Optimizers
    and data are never compared: their rates, or their NLLs, have different units.
    """
    if study.is_search:
        return {}
    found = {series: _reference(study, series) for series in study.series}
    return {series: name for series, name in found.items() if name is not None and name != series}


def _reference(study: Study, series: str) -> str | None:
    row = study.of(series).iloc[0]
    if row["mechanism"] != study.reference or row["variant"]:
        name = _same_but(study, row, {"mechanism": study.reference, "variant": ""})
        return name or (row["base"] if row["base"] in study.series else None)
    for axis, plain in PLAIN.items():
        if row[axis] != plain and (name := _same_but(study, row, {axis: plain})):
            return name
    return None


def _same_but(study: Study, row, changed: dict[str, str]) -> str | None:
    """Return the first series equal to a run except for the changed axes, or None."""
    axes = [axis for axis in ("mechanism", *SETTING_AXES) if axis != "cross"]
    wanted = {axis: changed.get(axis, row[axis]) for axis in axes}
    base = study.runs.drop_duplicates("series")
    names = set(base.loc[(base[axes] == wanted).all(axis=1), "series"])
    return next((name for name in study.series if name in names), None)
