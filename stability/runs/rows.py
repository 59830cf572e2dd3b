"""Make the rows that sinks are sent of a run, from what it logs and again from its own files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stability.runs.directory import RunDirectory, readable_rows


def said(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says: a sink's charts have a gap where the files have null."""
    return {name: value for name, value in row.items() if value is not None}


def by_block(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one step's rows of the blocks as one row, ``{"step": 4, "grad_norm/blocks.0.mixer": 0.5, …}``."""
    found: dict[str, Any] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "block")}
        found |= {"step": row["step"]} | {f"{name}/{row.get('block')}": value for name, value in values.items()}
    return found


def logged(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield what a run's files hold by now in the order in which it was logged: each step's metrics, then its
    blocks. Damaged rows are left out."""
    blocks: dict[int, list[dict[str, Any]]] = {}
    for row in readable_rows(directory.gradients_file):
        blocks.setdefault(row["step"], []).append(row)
    for row in readable_rows(directory.metrics_file):
        yield said(row)
        if row["step"] in blocks:
            yield said(by_block(blocks[row["step"]]))
