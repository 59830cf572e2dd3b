"""Summarise each checkpoint's recorded steps in one row, to monitor a sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stability.config.curvature import CurvatureSpec
from stability.curvature import NOT_DEFINED
from stability.runs.directory import RunDirectory, read_json
from stability.runs.parquet import read_table
from stability.runs.phases import file_of, list_phases
from stability.runs.schema import CHECKPOINT_STEP

READ = ["state", "method", "alpha_max", "lr", CHECKPOINT_STEP]


def medians(directory: RunDirectory, curvature: CurvatureSpec) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured checkpoint: ``step``, and statistics per optimizer state.

    Statistics: the median α_max (absent without a finite recorded value), and the percentage of stable steps (α_max
    above the current rate). Counted as in a report (`analysis.numbers.step_shares`), except for runs without a
    checkpoint due to divergence: these have no row here.
    """
    lr_peak = read_json(directory.spec_file)["lr_peak"]
    for phase in list_phases(directory, curvature.phase):
        if recorded := _read_steps(file_of(directory.curvature_file, phase)):
            # rows older than this column have no value, even if measured rows were added later
            known = [step[CHECKPOINT_STEP] for step in recorded if not pd.isna(step[CHECKPOINT_STEP])]
            row: dict[str, Any] = {"step": int(known[0] if known else directory.status()["step"])}
            for state in sorted({step["state"] for step in recorded}):
                row |= _summarise([step for step in recorded if step["state"] == state], f"{phase}/{state}", lr_peak)
            yield row


def _read_steps(file: Path) -> list[dict[str, Any]]:
    """Return a file's recorded steps with a defined α_max."""
    rows: list[Any] = read_table(file).to_pandas().reindex(columns=READ).to_dict("records") if file.exists() else []
    return [row for row in rows if row["method"] != NOT_DEFINED]


def _summarise(steps: Sequence[dict[str, Any]], where: str, lr_peak: float) -> dict[str, float]:
    # files older than the column lr have no values
    rates = [lr_peak if pd.isna(step["lr"]) else step["lr"] for step in steps]
    finite = [step["alpha_max"] for step in steps if math.isfinite(step["alpha_max"])]
    num_stable = sum(step["alpha_max"] > lr for step, lr in zip(steps, rates, strict=True))
    middle = {f"alpha_max/{where}": float(statistics.median(finite))} if finite else {}
    return {**middle, f"stable_percent/{where}": 100.0 * num_stable / len(steps)}
