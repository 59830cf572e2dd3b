"""Words of a study, read from its record ``study.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from stability.runs.older_words import OLDER, of_older
from stability.runs.words import ShareWords, Words


def recorded(record: Mapping[str, Any], objectives: Collection[str]) -> Words:
    """Return the words of a study's record.

    Words missing in an older record are today's of its objective (`OLDER`), or the default of another one. A record
    without any words has those of `of_older`.

    Args:
        record: the study's record.
        objectives: objectives of the study's runs.
    """
    objective = next(iter(objectives)) if len(set(objectives)) == 1 else ""
    found = record.get("words")
    if not isinstance(found, dict):
        return of_older(record, objective)
    known = {each.name: _read(found[each.name]) for each in fields(Words) if each.name in found}
    return replace(OLDER.get(objective, Words()), **known)


def _read(value: Any) -> Any:
    """Return a word as before its conversion to JSON."""
    if isinstance(value, list):
        return tuple(value)
    return ShareWords(**value) if isinstance(value, dict) else value
