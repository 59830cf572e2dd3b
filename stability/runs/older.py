"""Recognise files of older versions, which ``python -m stability.status upgrade=true`` rewrites; read a study's words.

This module imports `words` alone, so that pure readers of files can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stability.runs.words import ShareWords, Words

# By table of a study's results: columns that an upgrade adds, without values.
YOUNGER = {
    "runs": ("optimizer_state_bytes", "step_s", "state_bytes", "settings", "reading", "blind_to_order"),
    "curvature": ("rms_u",),
}


class OlderFile(RuntimeError):
    """A file of an older version.

    The file is not damaged, so code that skips damaged files must not skip it.
    """

    def __init__(self, path: Path):
        super().__init__(
            f"{path} was written by an older version; run python -m stability.status upgrade=true, with runs_dir=… if "
            "the runs are not in runs"
        )


BARE = ("norm", "ffn", "position", "linear")  # parts of a spec that were written as their names


def is_older_spec(values: Mapping[str, Any]) -> bool:
    """Return whether a run's ``spec.json`` has a part as its bare name."""
    return any(isinstance(values.get(key), str) for key in BARE)


def is_older_study(record: Mapping[str, Any]) -> bool:
    """Return whether a ``study.json`` lacks words, or the rungs of runs left early."""
    spec, words = record.get("spec"), record.get("words", {})
    if not isinstance(spec, dict) or "objective" not in spec or not isinstance(words, dict):
        return False  # of no sweep, or damaged
    return any(each.name not in words for each in fields(Words)) or (
        spec.get("halving") is not None and "rungs" not in record
    )


def read_words(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of a study's record by field; unknown ones are passed over."""
    found = record.get("words", {})
    return {each.name: _read(found[each.name]) for each in fields(Words) if each.name in found}


def words_of_record(record: Mapping[str, Any]) -> Words:
    """Return the words of a study's record; of a record without any, the defaults."""
    return Words(**read_words(record))


def _read(value: Any) -> Any:
    """Return a word as before its conversion to JSON."""
    if isinstance(value, list):
        return tuple(value)
    return ShareWords(**value) if isinstance(value, dict) else value
