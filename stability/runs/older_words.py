"""Words of studies recorded before ``study.json`` held words, or held all of them.

They cover the objectives and data sources of that time. Only words introduced since are ever added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stability.runs.words import ShareWords, Words

# Reports of such studies must not change; a test compares these with the objectives' own words.
OLDER = {
    "ar": Words(direction="causal"),
    "mlm": Words(direction="bidirectional"),
    "score_entropy": Words(unit="upper bound, nats per token", direction="bidirectional"),
    "classify": Words(
        position=("patch", "patches"),
        counted="patches",
        example="image",
        nll="cross entropy",
        unit="cross entropy, nats per image",
        held_out="images",
        share=ShareWords("val_accuracy", "accuracy", "of the held-out images whose class is told right"),
        baseline="class frequencies",
        baseline_nll="class-frequency NLL",
        baseline_source="training images' class frequencies",
        direction="bidirectional",
    ),
    "multitrack": Words(
        position=("residue", "residues"),
        unit="nats per masked position, its parts added up",
        generative_unit="nats per residue by the oracle's masked NLL",
        score=(
            "Its masked NLL in nats per residue, a sample's tracks added up, each averaged over {draws} draws of masks"
        ),
        of_oracle="nats per residue by the masked NLL of {oracle}",
        is_text=False,
        held_out="proteins",
        parts=(
            "nats per masked residue (sequence) and per masked structure token (structure), each averaged within a "
            "protein, then over proteins"
        ),
        scored_parts=(
            "Its masked NLL of the terminal checkpoints' samples, by its own mask schedules and in the units of the "
            "validation NLL: each part averaged over drawn masks, then over samples"
        ),
        direction="bidirectional",
    ),
}
OLDER_TOKENS = {"dna": "nucleotides", "stdlib": "bytes"}  # of data sources without a tokenizer


def of_older(record: Mapping[str, Any], objective: str) -> Words:
    """Return the words of a record without any, using its spec's settings.

    Args:
        record: the study's record.
        objective: common objective of its runs; "" if they have several.
    """
    asked, data = (_part(record, name) for name in ("objective", "data"))
    kept = f", {data['keep']:,} kept" if data.get("keep") else ""
    tokens = f"{data.get('tokenizer') or OLDER_TOKENS.get(data.get('name', ''), '')}{kept}"
    return replace(OLDER.get(objective, Words()), summary=_older_summary(asked), tokens=tokens)


def _older_summary(asked: Mapping[str, Any]) -> str:
    if asked.get("name") == "score_entropy":
        return f"score_entropy, {asked['graph']} graph, {asked['noise']} noise"
    if asked.get("name") == "mlm":
        rate = f"fixed at {asked['fixed_rate']:g}" if asked["mask_rate"] == "fixed" else asked["mask_rate"]
        return f"mlm, mask rate {rate}{', corruption bert' if asked.get('corruption') == 'bert' else ''}"
    if asked.get("name") == "multitrack":
        given = f"given {', '.join(asked['contexts'])}" if asked["contexts"] else "nothing given"
        by = f" (tokenizer {asked['tokenizer']})" if asked.get("tokenizer") else ""
        return f"multitrack, {' and '.join(asked['sources'])}{by} masked, {given}"
    return ""


def _part(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    spec = record.get("spec")
    part = spec.get(key) if isinstance(spec, dict) else None
    return part if isinstance(part, dict) else {}
