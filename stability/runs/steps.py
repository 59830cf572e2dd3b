"""Metadata of recorded-step files: protocol and undefined optimizer states. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from stability.runs.schema import PROTOCOL, own_settings

# metadata key: JSON list of the requested states undefined for the run's optimizer
UNDEFINED = "undefined"
# metadata key, optional: JSON object about the optimizer's step, with its "name"
OPTIMIZER = "optimizer"


def damage_of(table: pa.Table) -> str:
    """Return the damage of a table's metadata, or ""."""
    kinds = {PROTOCOL: dict, UNDEFINED: list, OPTIMIZER: dict}
    for key, text in (table.schema.metadata or {}).items():
        kind = kinds.get(key.decode(errors="replace"))
        try:
            is_right = kind is None or isinstance(json.loads(text), kind)
        except (ValueError, RecursionError):
            is_right = False
        if not is_right:
            return f"its {key.decode()} is no JSON {'list' if kind is list else 'object'}"
    stored = _read_protocol(table) or {"state": []}
    if "state" in table.column_names and not isinstance(stored.get("state"), list):
        return "its protocol names no states"
    return ""


def add_protocol(table: pa.Table, spec: dict[str, Any]) -> pa.Table:
    """Return a table of recorded steps with its protocol in each row.

    The protocol is null if the file is too old to contain it.

    Args:
        table: the recorded steps.
        spec: the run's spec as plain JSON.
    """
    stored = _read_protocol(table)
    told = (table.schema.metadata or {}).get(OPTIMIZER.encode())
    step = {} if told is None else {OPTIMIZER: json.loads(told)}
    protocol = None if stored is None else json.dumps(_complete_protocol(stored, spec) | step, sort_keys=True)
    # older than the column: all states used the same gradient
    if stored is not None and "gradient" not in table.column_names:
        table = table.append_column(
            "gradient", pa.repeat(pa.scalar(stored.get("gradient", "true"), pa.string()), len(table))
        )
    return table.append_column(PROTOCOL, pa.repeat(pa.scalar(protocol, pa.string()), len(table)))


def undefined_of(tables: Sequence[pa.Table]) -> dict[str, str]:
    """Return ``undefined_states`` of a run, names joined by spaces; {} if none."""
    found = {state for table in tables for state in undefined_states(table)}
    return {"undefined_states": " ".join(sorted(found))} if found else {}


def undefined_states(table: pa.Table) -> list[str]:
    """Return the requested optimizer states undefined for the run's optimizer.

    An older file without this entry lacks exactly the rows of these states.
    """
    told = (table.schema.metadata or {}).get(UNDEFINED.encode())
    if told is not None:
        return json.loads(told)
    stored = _read_protocol(table)
    if stored is None or not len(table):
        return []
    measured = set(table["state"].to_pylist())
    return [state for state in stored["state"] if state not in measured]


def _read_protocol(table: pa.Table) -> dict[str, Any] | None:
    text = (table.schema.metadata or {}).get(PROTOCOL.encode())
    return None if text is None else json.loads(text)


def _complete_protocol(protocol: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    own = own_settings(protocol, spec)
    dropout = spec.get("model", {}).get("dropout", 0.0)  # it affected only u
    return protocol | own | ({"dropout": dropout} if dropout else {})
