"""Run directories → three tables (parquet), the only thing that analysis reads. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stability.runs.directory import RunDirectory, read_json, read_jsonl
from stability.runs.study import StudyFolder

SCHEMA_VERSION = 1
RUNS_COLUMNS = [
    "study",
    "run_id",
    "mechanism",
    "variant",
    "residual",
    "norm",
    "cross",
    "optimizer",
    "objective",
    "data",
    "data_fingerprint",
    "model",
    "num_params",
    "lr",
    "seed",
    "status",
    "reason",
    "val_nll",
    "init_nll",
    "unigram_nll",
    "gen_nll",
    "gen_oracle",
    "num_steps",
    "num_tokens",
    "wall_s",
]
CURVATURE_COLUMNS = [
    "run_id",
    "phase",
    "state",
    "step",
    "slope",
    "curvature",
    "alpha_max",
    "lr",
    "loss_before",
    "loss_after",
    "method",
    "rel_error",
    "critical_lr",
    "parity_curvature",
    "parity_alpha_max",
    "note",
]
PROTOCOL = "protocol"  # the key of a file's metadata, and the collected table's column: JSON, the run's own values in place of nulls
COLLECTED_CURVATURE_COLUMNS = [*CURVATURE_COLUMNS, PROTOCOL]
# What `stability.hessian measure=…` adds beside <phase>.parquet, as <phase>_<name>.parquet; collected where a run has it.
SPECTRA_COLUMNS = {
    "profile": ["run_id", "phase", "state", "lr", "alpha", "loss", "loss_before", "slope", "curvature", "alpha_max", "critical_lr"],
    "sharpness": [
        "run_id",
        "phase",
        "state",
        "lr",
        "loss",
        "sharpness",
        "sharpness_residual",
        "adam_sharpness",
        "adam_residual",
        "adam_threshold",
        "adam_ratio",
        "trace",
        "trace_error",
        "gauss_newton_share",
        "noise_scale",
        "attention_logit_max",
        "attention_entropy",
    ],
    "density": ["run_id", "phase", "state", "lr", "probe", "node", "weight", "num_params"],
    "blocks": ["run_id", "phase", "state", "lr", "block", "share", "own", "curvature"],
}
SPECTRA = tuple(SPECTRA_COLUMNS)
# What `stability.probe` leaves in a run's folder as probes/<phase>_<name>.parquet; collected where a run has it.
_LAYER_COLUMNS = ["run_id", "phase", "lr", "layer", "mixer", "head"]
PROBE_COLUMNS = {
    "spectra": [
        *_LAYER_COLUMNS,
        "sequence",
        "num_positions",
        "head_width",
        "components",
        "step_size",
        "step_limit",
        "largest",
        "fiedler",
        "fiedler_low",
        "fiedler_high",
        "graph_fiedler",
        "non_oscillating",
        "gain",
        "second_eigenvalue",
        "energy_before",
        "energy_after",
        "variance_before",
        "variance_after",
    ],
    "filter": [*_LAYER_COLUMNS, "sequence", "probe", "node", "weight", "response"],
    "qk": [*_LAYER_COLUMNS, "index", "singular_value"],
}
# Of the plain graphs, which depend on no run: `stability.probe` writes it among a study's results.
CONNECTIVITY_COLUMNS = ["graph", "positions", "window", "connectivity", "bound_low", "bound_high"]
# What `stability.generate` leaves in a run's folder as generation/<phase>.parquet, a row a sample: `nll` in nats per scored token of the oracle's own.
GENERATION_COLUMNS = [
    "run_id",
    "phase",
    "sample",
    "nll",
    "nll_per_byte",
    "num_tokens",
    "num_bytes",
    "oracle",
    "oracle_sha256",
    "sampler",
    "steps",
    "temperature",
    "seed",
]
CURVES_COLUMNS = ["run_id", "step", "loss", "grad_norm", "update_norm", "lr", "val_nll"]


@dataclass(frozen=True)
class Results:
    """``runs``: a row a run; ``curvature``: a row a recorded step (`COLLECTED_CURVATURE_COLUMNS`); ``curves``: a row a training step.
    ``spectra`` and ``probes``: by name the tables of `SPECTRA_COLUMNS` and `PROBE_COLUMNS` that a run has, none of them empty; in ``probes`` also
    ``generation``: a row a scored sample (`GENERATION_COLUMNS`)."""

    runs: pd.DataFrame
    curvature: pd.DataFrame
    curves: pd.DataFrame
    spectra: dict[str, pd.DataFrame] = field(default_factory=dict)
    probes: dict[str, pd.DataFrame] = field(default_factory=dict)


def collect(study: str | Path) -> Results:
    """Read every run that a study lists, finished or not. Errors: ``ValueError`` where the folder is no study or a file is damaged."""
    folder = StudyFolder(study)
    directories = folder.runs()
    variants = folder.read().get("variants", {})  # a run's name for what it changes is the study's: another study may call it the base
    runs = [_run_row(folder.path.name, directory) | {"variant": variants.get(directory.run_id, "")} for directory in directories]
    curves = [{"run_id": directory.run_id, **row} for directory in directories for row in read_jsonl(directory.metrics_file)]
    spectra = {name: _joined([path for directory in directories for path in _tables(directory, name)], columns) for name, columns in SPECTRA_COLUMNS.items()}
    probes = {name: _joined([path for directory in directories for path in _probe_tables(directory, name)], columns) for name, columns in PROBE_COLUMNS.items()}
    probes["generation"] = _joined([path for directory in directories for path in generation_tables(directory)], GENERATION_COLUMNS)
    return Results(
        runs=pd.DataFrame(runs, columns=RUNS_COLUMNS),
        curvature=_stacked([_steps(directory, path) for directory in directories for path in step_tables(directory)], COLLECTED_CURVATURE_COLUMNS),
        curves=pd.DataFrame(curves, columns=CURVES_COLUMNS),
        spectra={name: frame for name, frame in spectra.items() if len(frame)},
        probes={name: frame for name, frame in probes.items() if len(frame)},
    )


def write(results: Results, folder: Path) -> None:
    """``runs``, ``curvature``, ``curves`` and what there is of spectra and probes, each a parquet under ``folder`` with the schema's version in it."""
    frames = {name: getattr(results, name) for name in ("runs", "curvature", "curves")} | results.spectra | results.probes
    for name, frame in frames.items():
        write_parquet(frame, folder / f"{name}.parquet", {"schema_version": str(SCHEMA_VERSION)})
    for name in (*SPECTRA, *PROBE_COLUMNS, "generation"):
        if name not in frames:  # of an earlier state of the study
            (folder / f"{name}.parquet").unlink(missing_ok=True)


def connectivity_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=CONNECTIVITY_COLUMNS)


def write_connectivity(frame: pd.DataFrame, folder: Path) -> None:
    """``connectivity.parquet`` under ``folder``, which `collect` and `write` leave alone."""
    write_parquet(frame, folder / "connectivity.parquet", {"schema_version": str(SCHEMA_VERSION)})


def write_parquet(frame: pd.DataFrame, path: Path, metadata: dict[str, str]) -> None:
    """Write a table under a temporary name and rename it. ``metadata``: strings kept in the file's schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}


def holds_columns(path: Path, columns: Sequence[str]) -> bool:
    """Whether a file has every one of ``columns``: a table measured before there was one of them lacks it."""
    return set(columns) <= set(pq.read_schema(path).names)


def _run_row(study: str, directory: RunDirectory) -> dict[str, Any]:
    status = directory.status()
    row: dict[str, Any] = {"study": study, "run_id": directory.run_id, "status": status["state"], "reason": status.get("reason", "")}
    row["num_steps"] = status.get("step", 0)
    if directory.spec_file.exists():
        row |= _spec_columns(read_json(directory.spec_file))
    return row | {key: value for key, value in status.get("result", {}).items() if key in RUNS_COLUMNS} | _generative_nll(directory)


def _generative_nll(directory: RunDirectory) -> dict[str, Any]:
    """Of the terminal checkpoint: the mean over samples of each one's nats per token of the oracle, and the oracle's name; nothing where none was scored."""
    path = directory.generation_file("terminal")
    table = pd.read_parquet(path) if path.exists() else pd.DataFrame()
    if not len(table):
        return {}
    scored = table["nll"].dropna().to_numpy()  # a sample of one token, or of none, has no score
    return {"gen_nll": scored.mean() if len(scored) else None, "gen_oracle": table["oracle"].iloc[0]}


def generation_tables(directory: RunDirectory) -> list[Path]:
    """The files of scored samples, a file a phase."""
    return sorted((directory.path / "generation").glob("*.parquet"))


def _spec_columns(spec: dict[str, Any]) -> dict[str, Any]:
    named = {key: spec[key]["name"] for key in ("mechanism", "residual", "optimizer", "objective", "data", "model")}
    cross = spec.get("cross") or {"name": ""}  # a run older than cross mechanisms has none
    return named | {"norm": spec["norm"], "cross": cross["name"], "lr": spec["lr_peak"], "seed": spec["seed"], "data_fingerprint": spec["data_fingerprint"]}


def step_tables(directory: RunDirectory) -> list[Path]:
    """The files of recorded steps, a file a phase, without the spectra beside them."""
    return [path for path in sorted((directory.path / "curvature").glob("*.parquet")) if not path.stem.endswith(tuple(f"_{name}" for name in SPECTRA))]


def _tables(directory: RunDirectory, name: str) -> list[Path]:
    return sorted((directory.path / "curvature").glob(f"*_{name}.parquet"))


def _steps(directory: RunDirectory, path: Path) -> pd.DataFrame:
    """A file of recorded steps with its protocol beside each row; None there where the file is too old to say."""
    return pd.read_parquet(path).assign(**{PROTOCOL: _protocol(directory, path)})


def _protocol(directory: RunDirectory, path: Path) -> str | None:
    stored = read_metadata(path).get(PROTOCOL)
    if stored is None:
        return None
    values, spec = json.loads(stored), read_json(directory.spec_file) if directory.spec_file.exists() else {}
    own = {key: spec[key] for key in ("batch", "clip_norm") if values.get(key) is None and key in spec}
    return json.dumps(values | own, sort_keys=True)


def read_probe(directory: RunDirectory, name: str) -> pd.DataFrame:
    """One run's table of `PROBE_COLUMNS`, all its phases."""
    return _joined(_probe_tables(directory, name), PROBE_COLUMNS[name])


def _probe_tables(directory: RunDirectory, name: str) -> list[Path]:
    return sorted((directory.path / "probes").glob(f"*_{name}.parquet"))


def _joined(paths: list[Path], columns: Sequence[str]) -> pd.DataFrame:
    return _stacked([pd.read_parquet(path) for path in paths], columns)


def _stacked(frames: list[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """All rows, in ``columns``; one that a file is too old to have is empty there."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True).reindex(columns=list(columns)) if filled else pd.DataFrame(columns=list(columns))
