"""What Ray Tune's own tables say of a sweep's runs, beside what the ledger says."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stability.runs.directory import RunDirectory


def last_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The last row of each ``result.json`` of the launches below a folder, by the run's id; the latest launch's."""
    return {path.parent.name: json.loads(path.open().readlines()[-1]) for path in _tables(folder, "result.json")}


def last_csv_rows(folder: Path) -> dict[str, dict[str, str]]:
    return {path.parent.name: list(csv.DictReader(path.open()))[-1] for path in _tables(folder, "progress.csv")}


def _tables(folder: Path, name: str) -> list[Path]:
    return [path for path in sorted(folder.glob(f"*/*/{name}")) if path.stat().st_size]


def told(run: RunDirectory) -> tuple[str, int, float | None]:
    """State, step and NLL of a run, read from its own files; without a result yet, the NLL of its last validation."""
    status = run.status()
    if "result" in status:
        return status["state"], status["step"], status["result"]["val_nll"]
    rows = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    validated = [row["val_nll"] for row in rows if row.get("val_nll") is not None]
    return status["state"], status["step"], validated[-1] if validated else None


def assert_agrees(folder: Path, runs: Sequence[RunDirectory]) -> None:
    """Tune's tables below a folder are of these runs alone, and say of each what the ledger says."""
    rows, csv_rows = last_rows(folder), last_csv_rows(folder)
    assert rows.keys() == csv_rows.keys() == {run.run_id for run in runs}
    for run in runs:
        row, csv_row, expected = rows[run.run_id], csv_rows[run.run_id], told(run)
        assert (row["state"], row["step"], row["val_nll"]) == expected
        assert row["done"] is True
        assert [csv_row[key] for key in ("state", "step", "val_nll")] == [
            str("" if each is None else each) for each in expected
        ]
