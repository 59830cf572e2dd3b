"""Words of a study, read from its record ``study.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stability.runs.words import ShareWords, Words


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
