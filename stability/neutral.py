"""Fields that are younger than runs that exist: what such a run did where there was no field yet, so that it keeps its id."""

from __future__ import annotations

from typing import Any

# By part ("" is the spec itself, a bare name one of its groups of settings), the value of a field that means "as before the field existed". `run_id`
# leaves such a field out. An entry says what runs of that time did: it is never changed, whatever
# becomes of the field's default, or their ids would stand for other runs.
NEUTRAL: dict[str, dict[str, Any]] = {
    "": {"cross": None, "microbatch": None, "guards": {}, "log": {}},
    "checkpoint": {"keep_last": None, "keep_best": 0},
    "guards": {"post_clip_norm": None, "check_every": 1, "on_nonfinite": "stop", "retries": 0},
    "log": {"gradients": 0},
    "objective mlm": {"context": 0, "fixed_rate": 0.15, "corruption": "mask", "loss_chunk": None},
    "objective ar": {"loss_chunk": None},
    "optimizer adamw": {"decay": "all"},
    "mechanism sa": {"mask_diagonal": False},
    "mechanism sc": {"graph": "window", "iterations": 1, "step": "fixed"},
    # Trains nothing else: a run older than it was judged without (a noisy loss then passed for a spike), and keeps that verdict until it is trained again.
    "verdict": {"noise_margin": 8.0},
}


def without_neutral(values: dict[str, Any]) -> dict[str, Any]:
    """A run's spec as plain JSON values less every field that holds its neutral value; the parts inside a pattern's (`mix`) too."""
    kept = dict(values)
    for key, value in kept.items():
        if isinstance(value, dict):
            kept[key] = _part(key, value) if "name" in value else _less(value, key)
    return _less(kept, "")  # last: a group of settings that is younger than runs is empty once its own have gone


def _part(key: str, part: dict[str, Any]) -> dict[str, Any]:
    kept = _less(part, f"{key} {part['name']}")
    if isinstance(kept.get("parts"), list):
        kept["parts"] = [_part(key, item) for item in kept["parts"]]
    return kept


def _less(values: dict[str, Any], of: str) -> dict[str, Any]:
    neutral = NEUTRAL.get(of, {})
    return {key: value for key, value in values.items() if not (key in neutral and value == neutral[key])}
