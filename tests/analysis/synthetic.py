"""Writes studies as `stability.runs.results` lays them on disk, with numbers made up by closed forms: same arguments,
same files."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.study.load import COLUMNS, SCHEMA_VERSION
from stability.registry import Registry

QUICKSTART_LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
UNIGRAM, INIT = 3.20, 5.60
FINGERPRINT = hashlib.sha256(b"synthetic").hexdigest()
# Where each mechanism's NLL begins to rise, its best NLL, and the LR at which it diverges (see `nll`).
SHAPES = {"sa": (3e-3, 2.88, 5e-2), "sc": (8e-3, 2.86, math.inf), "mix": (5e-3, 2.89, 2e-1), "sw": (3e-3, 2.93, 6e-2)}
PROVENANCE: dict[str, Any] = {
    "command": "python -m stability.sweep",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": True,
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.6", "ray": "2.60.0"},
    "hardware": {"cpu": "AMD EPYC 7B13", "cores": 2, "memory_gb": 15.6, "gpu": None},
    "started_at": "2026-11-21T02:40:00+00:00",
    "wall_s": 431.0,
    "data_description": "The standard library's docstrings and pydoc topics, bytes; 1 % of the documents held out",
    "data_fingerprint": FINGERPRINT,
}

Nll = Callable[[str, float, int], float]


def run_id(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def nll(mechanism: str, lr: float, seed: int) -> float:
    """Slow learning below the best LR, degradation above it, ``inf`` (a divergence) far above; seeds shift both a
    little."""
    best_lr, best, limit = SHAPES.get(mechanism, (3e-3, 2.90, math.inf))
    shift = 0.06 * ((zlib.crc32(f"{mechanism}{seed}".encode()) % 1000) / 500 - 1)
    if lr > limit * 10**shift:
        return math.inf
    distance = math.log10(lr / best_lr) + shift
    slope = 0.16 if distance < 0 else 0.10 if mechanism == "sc" else 0.25
    return best + 0.1 * shift + slope * abs(distance) ** 1.5


def write_study(
    folder: Path,
    *,
    name: str = "synthetic",
    mechanisms: Sequence[str] = ("sa", "sc", "mix", "sw"),
    lrs: Sequence[float] = QUICKSTART_LRS,
    seeds: int = 2,
    nll: Nll = nll,
    unigram: float = UNIGRAM,
    statuses: dict[tuple[str, float, int], tuple[str, str]] | None = None,
    alpha: Callable[[str, float, int, str], Sequence[float]] | None = None,
    states: Sequence[str] = ("paper", "checkpoint"),
    phases: Sequence[str] = ("terminal",),
    curves: bool = True,
    settings: Sequence[dict[str, str]] = ({},),
    provenance: dict[str, Any] | None = PROVENANCE,
) -> Path:
    """Write ``folder/studies/<name>`` and return it.

    ``nll(mechanism, lr, seed)`` → the validation NLL, inf for a divergence. ``statuses`` overrides (status, reason) of
    single runs. ``alpha(mechanism, lr, seed, state)`` → the recorded α_max of one run; None: an empty curvature table.
    """
    keys = [
        (m, lr, seed, tuple(setting.items()))
        for setting in settings
        for m in mechanisms
        for lr in lrs
        for seed in range(seeds)
    ]
    runs = [
        _run(name, m, lr, seed, dict(setting), nll(m, lr, seed), unigram, (statuses or {}).get((m, lr, seed)))
        for m, lr, seed, setting in keys
    ]
    results = folder / "studies" / name / "results"
    results.mkdir(parents=True, exist_ok=True)
    curvature = [
        row for run in runs for phase in phases for state in states for row in _steps(run, phase, state, alpha)
    ]
    write_table(results / "runs.parquet", "runs", runs)
    write_table(results / "curvature.parquet", "curvature", curvature)
    write_table(results / "curves.parquet", "curves", _curves(runs) if curves and runs else [])
    manifest: dict[str, Any] = {
        "name": name,
        "run_ids": [run["run_id"] for run in runs],
        "launcher": "serial",
        "command": f"python -m stability.sweep name={name}",
        "words": words_of(settings[0].get("objective", "mlm")),
    }
    if provenance is not None:
        manifest["provenance"] = provenance
    (results.parent / "study.json").write_text(json.dumps(manifest))
    return results.parent


def words_of(objective: str, **more: str) -> dict[str, Any]:
    """The words that a sweep records for an objective, with its settings' and its data's own (``more``)."""
    own = Registry("objectives").load(objective)
    return asdict(replace(own.words, direction=own.direction, **more))


def write_table(
    path: Path, name: str, rows: list[dict[str, Any]] | pd.DataFrame, version: int | None = SCHEMA_VERSION
) -> None:
    """Parquet with the schema version as `results` stores it."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows, columns=list(COLUMNS[name]))
    table = pa.Table.from_pandas(frame, preserve_index=False)
    key = {} if version is None else {b"schema_version": str(version).encode()}
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **key}), path)


def _run(
    study: str,
    mechanism: str,
    lr: float,
    seed: int,
    setting: dict[str, str],
    value: float,
    unigram: float,
    override: tuple[str, str] | None,
) -> dict[str, Any]:
    diverged = not math.isfinite(value)
    status, reason = (
        ("diverged", "non-finite loss at step 57")
        if diverged
        else ("plateaued", "")
        if value >= min(INIT, unigram)
        else ("stable", "")
    )
    if override is not None:
        status, reason = override
    steps = {"diverged": 57, "failed": 11, "queued": 0, "running": 80}.get(status, 200)
    finished = status in ("stable", "spiked", "plateaued")
    parameters = {"sa": 247_872, "sw": 247_872, "sc": 231_456, "mix": 239_664}.get(mechanism, 250_000)
    return {
        "study": study, "run_id": run_id(study, mechanism, lr, seed, setting), "mechanism": mechanism, "variant": "", "residual": "identity",
        "norm": "layernorm", "cross": "", "optimizer": "adamw", "objective": "mlm", "data": "docstrings", "data_fingerprint": FINGERPRINT, "model": "nano",
        "num_params": parameters, "lr": lr, "seed": seed, "status": status, "reason": reason, "val_nll": value if finished else None,
        "init_nll": INIT, "unigram_nll": unigram, "gen_nll": None, "num_steps": steps, "num_tokens": steps * 512, "wall_s": 7.5 * steps / 200,
        "planned_steps": 200,
    } | setting  # fmt: skip


def quickstart_alpha(mechanism: str, lr: float, seed: int, state: str) -> list[float]:
    """25 log-normal steps whose median falls with LR, fastest for sa; a few zeros, infinities and lost steps at the top
    rates."""
    draws = np.random.default_rng(zlib.crc32(f"{mechanism}{lr}{seed}{state}".encode()))
    fall = {"sa": 1.3, "sw": 1.2, "mix": 0.9, "sc": 0.35}.get(mechanism, 1.0)
    center = 8e-3 * (5 if state == "paper" else 1) * (lr / 1e-3) ** (-fall)
    values = center * 10 ** draws.normal(0, 0.35, 25)
    values[draws.random(25) < 0.06] = np.inf
    if lr > 5e-3:
        values[draws.random(25) < 0.15] = 0.0
    if lr > 5e-2 and mechanism != "sc":
        values[:2] = np.nan
    return values.tolist()


def _steps(run: dict[str, Any], phase: str, state: str, alpha) -> list[dict[str, Any]]:
    if (
        alpha is None
        or run["status"] in ("failed", "queued", "running")
        or (run["status"] == "diverged" and phase == "terminal")
    ):
        return []
    return [
        {
            "run_id": run["run_id"], "phase": phase, "state": state, "step": step, "slope": -0.5,
            "curvature": 1.0 / value if value else 1.0, "alpha_max": value,
            "lr": run["lr"], "loss_before": 2.9, "loss_after": 2.89, "method": "taylor" if run["mechanism"] != "sw" else "finite_difference",
            "rel_error": 1e-5 * (1 + run["seed"]) if step == 0 else None,
        }
        for step, value in enumerate(alpha(run["mechanism"], run["lr"], run["seed"], state))
    ]  # fmt: skip


def _curve(run: dict[str, Any]) -> dict[str, np.ndarray]:
    """An exponential from the NLL at initialisation to the final one, with noise; a diverging run climbs over its last
    ten steps."""
    draws = np.random.default_rng(int(run["run_id"], 16) % 2**32)
    end = run["val_nll"] if run["val_nll"] is not None else 3.0
    number = run["num_steps"]
    steps = np.arange(1, number + 1)
    losses = end + (INIT - end) * np.exp(-steps / (3 + 0.004 / run["lr"])) + draws.normal(0, 0.08, number)
    if run["status"] == "diverged":
        losses += 0.03 * np.exp(np.maximum(0, steps - number + 12) * 0.7)
    values = np.where(steps % 50 == 0, losses, math.nan)
    if run["val_nll"] is not None:
        values[-1:] = end
    if run["status"] == "diverged":
        losses[-1:] = math.nan
    return {"step": steps, "loss": losses, "val_nll": values}


def _curves(runs: list[dict[str, Any]]) -> pd.DataFrame:
    """The curves of all runs as one frame, made column by column."""
    curves = [_curve(run) for run in runs]
    frame = pd.DataFrame({key: np.concatenate([curve[key] for curve in curves]) for key in curves[0]})
    lengths = [len(curve["step"]) for curve in curves]
    for key in ("run_id", "lr"):
        frame[key] = np.repeat(
            np.array([run[key] for run in runs], dtype=object if key == "run_id" else float), lengths
        )
    return frame.assign(grad_norm=1.0, update_norm=0.1).reindex(columns=list(COLUMNS["curves"]))
