"""Name the series of a study: the one place that says what a line of a figure, a row of a table and the subject of a
sentence are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.words import shortened, value_text

if TYPE_CHECKING:
    Frame = Any
else:
    Frame = pd.DataFrame

# Axes beside mechanism, lr and seed: runs that differ in one of them are never averaged together.
SETTING_AXES = ("residual", "norm", "cross", "optimizer", "objective", "data", "data_fingerprint", "model", "variant")
MADE_OF = {"mix": "pattern", "two_way": "of"}  # mechanisms that are made of others, and the setting that says of which


def with_series(runs: Frame, manifest: Mapping[str, Any]) -> Frame:
    """Add what the runs are called.

    - ``setting``: the other axes that vary in this study, the variant of an ablation last; "" where none does.
    - ``series``: mechanism (sa+ca with its cross mechanism) and setting: what one line of a figure shows. The base of
      an ablation over what it is made of says so as its variants do: two_way of=gla beside two_way of=retnet.
    - ``base``: the series that a variant of an ablation belongs to; its own for the rest.
    - ``label``: the series without those axes that are not the mechanism's own.
    - ``earlier``: the series as files of older versions have it.
    """
    # A float's last digit must not split one learning rate in two columns.
    runs["lr"] = [float(f"{lr:.9g}") for lr in runs["lr"]]
    varying = [axis for axis in SETTING_AXES if axis not in ("variant", "cross") and runs[axis].nunique() > 1]
    # With cross=auto each mechanism has its own: a name's second half, unless one mechanism comes with several.
    varying += ["cross"] if (runs.groupby("mechanism")["cross"].nunique() > 1).any() else []
    named = [
        f"{m}+{cross}" if cross and "cross" not in varying else m
        for m, cross in zip(runs["mechanism"], runs["cross"], strict=True)
    ]
    columns = [_labels(axis, list(runs[axis])) for axis in varying]
    labels = [_joined(*row) for row in zip(*columns, strict=True)] if varying else [""] * len(runs)
    told = _bases(manifest)
    bases, variants = [told.get(m, "") for m in runs["mechanism"]], [shortened(each) for each in runs["variant"]]
    own = [variant or base for variant, base in zip(variants, bases, strict=True)]
    runs["base"] = list(map(_joined, named, labels, bases))
    runs["setting"] = list(map(_joined, labels, variants))
    runs["series"] = list(map(_joined, named, labels, own))
    runs["label"] = list(map(_joined, runs["mechanism"], own))
    runs["earlier"] = list(map(_joined, named, labels, runs["variant"]))
    return runs


def earlier(runs: Frame) -> dict[str, str]:
    """Return every series by the name that files of older versions have for it."""
    return dict(zip(runs["earlier"], runs["series"], strict=True))


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _bases(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return by mechanism that is made of others the setting of its base that says of which, as the labels of its
    variants have it; of those that the study varies."""
    return {
        item["part"]: f"{item['setting']}={value_text(value['value'])}"
        for item in manifest.get("ablations") or []
        if MADE_OF.get(item["part"]) == item["setting"]
        for value in item["values"]
        if not value["variant"]
    }


def _labels(axis: str, values: list[str]) -> list[str]:
    """Return what a series' name says of an axis, one of each run. A size that all runs have is left out: of "nano" and
    "nano precision=bf16" are left "" and "precision=bf16"."""
    if axis == "data_fingerprint":
        return [value[:12] or "none" for value in values]
    sizes = {value.partition(" ")[0] for value in values}
    if axis == "model" and len(sizes) == 1:
        return [value.partition(" ")[2] for value in values]
    return [value or "none" for value in values]


def setting_rank(setting: str) -> tuple[bool, Any]:
    """Sort key: settings by name, those with the plain residual before the others that they are compared with."""
    return (setting.split(" ")[0] != "identity", natural(setting))


def natural(text: str) -> tuple[tuple[str, float], ...]:
    """Sort key under which window=8 comes before window=12."""
    return tuple(
        (part, 0.0) if index % 2 == 0 else ("", float(part))
        for index, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", text))
    )
