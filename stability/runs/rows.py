"""Rows for sinks, made during logging or later from a run's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stability.runs.directory import RunDirectory, readable_rows


def drop_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its nulls; a sink's chart has a gap there."""
    return {name: value for name, value in row.items() if value is not None}


def merge_blocks(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one step's block rows as one row.

    Example: ``{"step": 4, "grad_norm/blocks.0.mixer": 0.5, …}``. A row without a block is the edge's: ``slope/edge``.
    """
    found: dict[str, Any] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "block")}
        found |= {"step": row["step"]} | {f"{name}/{row.get('block', 'edge')}": value for name, value in values.items()}
    return found


def read_logged_rows(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield a run's logged rows in their original order: each step's metrics, then its signals.

    Damaged rows are omitted.
    """
    signals: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in directory.signal_files}
    for name, path in directory.signal_files.items():
        for row in readable_rows(path):
            signals[name].setdefault(row["step"], []).append(row)
    for row in readable_rows(directory.metrics_file):
        yield drop_nulls(row)
        for rows in signals.values():
            if row["step"] in rows:
                yield drop_nulls(merge_blocks(rows[row["step"]]))
