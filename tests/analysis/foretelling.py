"""Builds studies whose runs were measured early, run by run, with every number given."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.study.load import Study
from analysis.study.naming import name_series
from stability.runs.schema import COLLECTED_CURVATURE_COLUMNS, CURVES_COLUMNS, RUNS_COLUMNS, TEXT

K, MEASURED_STEPS, LAST = 50, (1, 10), 200  # the horizon is step 61
PROTOCOL = {
    "warmup_batches": 5, "warmup_steps": MEASURED_STEPS[0], "recorded_steps": MEASURED_STEPS[1], "weight_decay": True,
    "clip_norm": None, "batch": None, "microbatch": None, "gradient": "auto", "state": ["checkpoint"], "method": "auto",
}  # fmt: skip


def run(lr: float, alpha: float | Sequence[float] | None, status: str = "stable", **more: Any) -> dict[str, Any]:
    """A run at a rate, with its early α_max (the same at every recorded step, or each step's; None: not measured).
    ``more``: mechanism, optimizer, seed, end (the last step), top (of a spike), loss, grad_norm, val_nll, later (loss
    after the horizon)."""
    return {"lr": lr, "alpha": alpha, "status": status} | more


def study_of(runs: Sequence[dict[str, Any]], name: str = "made_up", **fields: Any) -> Study:
    rows = [_run(number, each, name) for number, each in enumerate(runs)]
    frames = {
        "runs": pd.DataFrame([row for row, _, _ in rows], columns=RUNS_COLUMNS),
        "curvature": pd.DataFrame(
            [step for _, steps, _ in rows for step in steps], columns=COLLECTED_CURVATURE_COLUMNS
        ),
        "curves": pd.DataFrame([point for _, _, points in rows for point in points], columns=CURVES_COLUMNS),
    }
    for frame in frames.values():
        for column in frame:
            values = frame[column].astype(object)
            frame[column] = values.where(values.notna(), "") if column in TEXT else values.astype(float)
    frames["runs"] = name_series(frames["runs"], {})
    return Study(name=name, study={"name": name}, **frames, **fields)


def _run(number: int, given: dict[str, Any], study: str) -> tuple[dict[str, Any], list[dict], list[dict]]:
    status, end = given["status"], given.get("end", LAST)
    identity = given.get("run_id", f"{study}{number}")
    finished = status in ("stable", "spiked", "plateaued")
    reason = (
        f"smoothed loss rose 0.90 nats above its minimum by step {given['top']} and came back" if "top" in given else ""
    )
    row = {
        "study": study, "run_id": identity, "mechanism": given.get("mechanism", "sa"), "residual": "identity",
        "norm": "layernorm", "optimizer": given.get("optimizer", "adamw"), "objective": "mlm", "data": "docstrings",
        "model": "nano", "num_params": 1e5, "lr": given["lr"], "seed": given.get("seed", 0), "status": status, "reason": reason,
        "val_nll": given.get("val_nll", 2.5) if finished else math.nan, "init_nll": 5.5, "unigram_nll": 3.2,
        "num_steps": end, "planned_steps": LAST, "last_checkpoint_step": K if end >= K else math.nan,
    }  # fmt: skip
    alphas = given["alpha"]
    alphas = [] if alphas is None else [alphas] * MEASURED_STEPS[1] if isinstance(alphas, float | int) else alphas
    steps = [
        {"run_id": identity, "phase": "earliest", "state": "checkpoint", "step": step, "alpha_max": value, "lr": given["lr"],
         "method": "taylor", "checkpoint_step": K, "protocol": json.dumps(PROTOCOL),
         "critical_lr": given.get("critical", math.nan)}
        for step, value in enumerate(alphas)
    ]  # fmt: skip
    points = [
        {"run_id": identity, "step": step, "loss": given.get("later", 3.0) if step > K + 11 else given.get("loss", 3.0),
         "grad_norm": given.get("grad_norm", 1.0), "lr": given["lr"]}
        for step in range(1, end + 1)
    ]  # fmt: skip
    return row, steps, points
