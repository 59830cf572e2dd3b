"""Read what a study's record, ``study.json``, says that things are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from stability.runs.older_words import OLDER, of_older
from stability.runs.words import ShareWords, Words


def recorded(record: Mapping[str, Any], objectives: Collection[str]) -> Words:
    """Return the words that ``study.json`` holds. What a record from before lacks is today's of its objective
    (`OLDER`), all of it where there were no words yet (`of_older`); of another objective's the default.

    ``objectives``: names of those that the study's runs have.
    """
    objective = next(iter(objectives)) if len(set(objectives)) == 1 else ""
    found = record.get("words")
    if not isinstance(found, dict):
        return of_older(record, objective)
    known = {each.name: _read(found[each.name]) for each in fields(Words) if each.name in found}
    return replace(OLDER.get(objective, Words()), **known)


def _read(value: Any) -> Any:
    """Return a word as it was before it became JSON."""
    if isinstance(value, list):
        return tuple(value)
    return ShareWords(**value) if isinstance(value, dict) else value
