"""Name a study's series, for figures, tables and sentences alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.words import shorten, value_text

if TYPE_CHECKING:
    Frame = Any
else:
    Frame = pd.DataFrame

# Axes besides mechanism, lr and seed: averages never mix runs with different values.
SETTING_AXES = ("residual", "norm", "cross", "optimizer", "objective", "data", "data_fingerprint", "model", "variant")
# Settings that define a mechanism's kind: part of the name if ablated or unusual.
NAMED_IN_BASE = {"mix": ("pattern", "sc.rope"), "two_way": ("of",), "sc": ("rope",)}
NAMED_IF_UNUSUAL = {"sc": ("step",)}  # further ones that are named only where they are unusual
# Full names of abbreviated mechanisms, residual connections and objectives.
SPELLED = {
    "sa": "softmax self-attention", "sc": "self-consensus", "mix": "layers of self-attention, then of self-consensus",
    "sw": "sliding-window attention", "ca": "cross-attention", "cc": "cross-consensus",
    "fasa": "frequency-aware sparse attention", "fox": "attention with a forget gate (Forgetting Transformer)",
    "gla": "gated linear attention", "hgrn2": "gated linear recurrence with an expanded state",
    "kda": "Kimi Delta Attention", "nsa": "native sparse attention", "sparge": "block-sparse attention (SpargeAttn)",
    "sparsek": "attention to the k best keys", "retnet": "multi-scale retention",
    "deltanet": "linear attention with the delta rule", "mamba": "selective state space model",
    "mamba2": "selective state space model, one decay per head", "titans": "neural memory trained while it reads",
    "attentionx": "values less a multiple of their softmax attention (AttentionX)",
    "hc": "hyper-connections", "mhc": "manifold-constrained hyper-connections",
    "mhc_lite": "hyper-connections that are doubly stochastic by construction",
    "mlm": "masked language model", "ar": "next-token prediction", "multitrack": "masked tracks of a protein",
    "score_entropy": "discrete diffusion by ratios of probabilities", "classify": "class of an image",
}  # fmt: skip
BLIND = "(blind)"  # suffix for mechanisms that hardly or never distinguish a text from its mirror image


def spell(names: Iterable[str]) -> str:
    """Return the full names of abbreviated mechanisms and objectives as one sentence; "" for none."""
    found = [f"{name}: {SPELLED[name]}" for name in dict.fromkeys(names) if name in SPELLED]
    return f"{'; '.join(found)}." if found else ""


def name_series(runs: Frame, manifest: Mapping[str, Any]) -> Frame:
    """Add name columns to the runs.

    - ``setting``: the varying axes except mechanism, an ablation's variant last; "" if none varies.
    - ``series``: mechanism (sa+ca with its cross mechanism) and setting; one line in a figure. A base is named by its
      kind, as its variants are: ``two_way of=gla`` beside ``two_way of=retnet``. A single mechanism of an unusual kind
      is too, e.g. sc with its rope. `BLIND` follows if order-blind.
    - ``base``: the base series for an ablation's variant, else the series itself.
    - ``label``: the series without axes outside the mechanism.
    - ``earlier``: the series as named in older files.
    """
    # Rounding errors must not split one learning rate into two columns.
    runs["lr"] = [float(f"{lr:.9g}") for lr in runs["lr"]]
    whole = _restore_axes(runs, manifest)
    varying = [axis for axis in SETTING_AXES if axis not in ("variant", "cross") and whole[axis].nunique() > 1]
    # With cross=auto each mechanism has one cross mechanism, named after "+". If one has several, cross is an axis.
    varying += ["cross"] if (runs.groupby("mechanism")["cross"].nunique() > 1).any() else []
    named = [
        f"{m}+{cross}" if cross and "cross" not in varying else m
        for m, cross in zip(runs["mechanism"], runs["cross"], strict=True)
    ]
    columns = [_labels(axis, list(whole[axis])) for axis in varying]
    labels = [_join(*row) for row in zip(*columns, strict=True)] if varying else [""] * len(runs)
    base_names = _base_names(runs, manifest)
    variants = [shorten(each) for each in runs["variant"]]
    own = [variant or base for variant, base in zip(variants, base_names, strict=True)]
    blind = [BLIND if each == 1 else "" for each in runs["blind_to_order"]]
    runs["setting"] = list(map(_join, labels, variants))
    runs["series"] = list(map(_join, named, labels, own, blind))
    runs["label"] = list(map(_join, runs["mechanism"], own, blind))
    runs["earlier"] = list(map(_join, named, labels, runs["variant"]))
    base_series = list(map(_join, named, labels, base_names))
    blind_series = {series for series, mark in zip(runs["series"], blind, strict=True) if mark}
    runs["base"] = [_join(base, BLIND if _join(base, BLIND) in blind_series else "") for base in base_series]
    return runs


def _restore_axes(runs: Frame, manifest: Mapping[str, Any]) -> Frame:
    """Return the runs with the base's value where a variant is another choice of an axis, which its label tells."""
    restored = runs.copy()
    for item in manifest.get("ablations") or []:
        if not item["setting"] and item["part"] in SETTING_AXES:
            base = next(value["value"] for value in item["values"] if not value["variant"])
            of_item = {value["variant"] for value in item["values"] if value["variant"]}
            restored.loc[restored["variant"].isin(of_item), item["part"]] = base
        elif not item["setting"]:  # a part of the model's label, e.g. ffn=moe
            restored["model"] = [
                " ".join(word for word in model.split(" ") if not word.startswith(f"{item['part']}="))
                for model in restored["model"]
            ]
    return restored


def earlier(runs: Frame) -> dict[str, str]:
    """Return current series names by older files' names."""
    return dict(zip(runs["earlier"], runs["series"], strict=True))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _base_names(runs: Frame, manifest: Mapping[str, Any]) -> list[str]:
    """Return the kind part of each base's name: ablated or unusual settings in `NAMED_IN_BASE`."""
    ablated = {
        (item["part"], item["setting"]): f"{item['setting']}={value_text(value['value'])}"
        for item in manifest.get("ablations") or []
        for value in item["values"]
        if not value["variant"]
    }
    names = []
    for mechanism, settings in zip(runs["mechanism"], runs["settings"], strict=True):
        unusual = {setting.partition("=")[0]: shorten(setting) for setting in settings.split(" ")}
        known = [ablated.get((mechanism, key), unusual.get(key, "")) for key in NAMED_IN_BASE.get(mechanism, ())]
        names.append(_join(*known, *(unusual.get(key, "") for key in NAMED_IF_UNUSUAL.get(mechanism, ()))))
    return names


def _labels(axis: str, values: list[str]) -> list[str]:
    """Return an axis's part of each run's series name.

    A size common to all runs is left out: "nano" and "nano precision=bf16" become "" and "precision=bf16".
    """
    if axis == "data_fingerprint":
        return [value[:12] or "none" for value in values]
    sizes = {value.partition(" ")[0] for value in values}
    if axis == "model" and len(sizes) == 1:
        return [value.partition(" ")[2] for value in values]
    return [value or "none" for value in values]


def setting_rank(setting: str) -> tuple[bool, Any]:
    """Return a sort key: settings by name, with the plain residual first."""
    return (setting.split(" ")[0] != "identity", natural(setting))


def natural(text: str) -> tuple[tuple[str, float], ...]:
    """Return a sort key with window=8 before window=12."""
    return tuple(
        (part, 0.0) if index % 2 == 0 else ("", float(part))
        for index, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", text))
    )
