"""Run directories → three tables (parquet), the only thing that analysis reads. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from stability.runs.directory import RunDirectory
from stability.runs.parquet import joined, read_curves, read_table, write_parquet
from stability.runs.phases import TERMINAL
from stability.runs.run_files import RunFiles, parquet_files
from stability.runs.samples import SAMPLES_COLUMNS, sample_rows
from stability.runs.searches import SEARCH_COLUMNS, search_tables
from stability.runs.steps import PROTOCOL, undefined_of, undefined_states, with_protocol
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
    "val_accuracy",  # of a classifier, else missing
    "val_nll_sequence",  # the parts of a protein's NLL, as far as its objective predicts them, and what token frequencies reach in each
    "val_nll_structure",
    "unigram_nll_sequence",
    "unigram_nll_structure",
    "gen_nll",
    "gen_nll_sequence",  # its parts, likewise
    "gen_nll_structure",
    "gen_oracle",
    "num_steps",
    "num_tokens",
    "wall_s",
    "skipped_steps",
    "restores",
    "undefined_states",  # optimizer states asked for in which the run's optimizer has no α_max
    "planned_steps",  # that the run was to take; num_steps is how far it came
    "last_checkpoint_step",  # missing where it left none
]
CHECKPOINT_STEP = "checkpoint_step"  # of the run: where the measured checkpoint stands
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
    "gradient",  # whose slope entered α_max: "true" (the loss's own) or "clipped"
    "difference_curvature",  # what the central difference behind rel_error gave
    "float64_curvature",  # the curvature once more in float64, where the two did not agree
    CHECKPOINT_STEP,
]
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
        *_LAYER_COLUMNS, "sequence", "num_positions", "head_width", "components", "step_size", "step_limit", "largest", "fiedler", "fiedler_low",
        "fiedler_high", "graph_fiedler", "non_oscillating", "gain", "second_eigenvalue", "energy_before", "energy_after", "variance_before",
        "variance_after",
    ],
    "filter": [*_LAYER_COLUMNS, "sequence", "probe", "node", "weight", "response"],
    "qk": [*_LAYER_COLUMNS, "index", "singular_value"],
    "discrepancy": [*_LAYER_COLUMNS, "sequence", "num_positions", "gamma", "diagonal", "value_rms", "own_rms", "unscaled_rms"],
    "streams": ["run_id", "phase", "lr", "connection", "branch", "matrix", "quantity", "quantile", "value", "num_values"],
}  # fmt: skip
# Of graphs that depend on no run: `stability.probe` writes them among a study's results, which `collect` and `write` leave alone.
GRAPH_COLUMNS = {
    "connectivity": ["graph", "positions", "window", "connectivity", "bound_low", "bound_high"],
    "pdmm": ["graph", "schedule", "constraints", "rho", "averaging", "nodes", "edges", "iteration", "error", "discrepancy"],
}
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
# What those of proteins have beside them: the parts of `nll`, whether contexts were given, and how many drawn masks each score is a mean over.
PROTEIN_GENERATION_COLUMNS = [*GENERATION_COLUMNS, "nll_sequence", "nll_structure", "contexts", "oracle_draws"]
CURVES_COLUMNS = ["run_id", "step", "loss", "grad_norm", "update_norm", "lr", "val_nll"]
# What a run with `log.gradients=…` logs beside them, a row a step and block of parameters.
GRADIENT_COLUMNS = ["run_id", "step", "block", "grad_norm", "grad_share", "update_ratio"]


@dataclass(frozen=True)
class Results:
    """``runs``: a row a run; ``curvature``: a row a recorded step (`COLLECTED_CURVATURE_COLUMNS`); ``curves``: a row a training step.
    ``spectra`` and ``probes``: by name the tables of `SPECTRA_COLUMNS` and `PROBE_COLUMNS` that a run has, none of them empty; in ``probes`` also
    ``generation``: a row a scored sample (`PROTEIN_GENERATION_COLUMNS`), ``samples``: the first of each run (`SAMPLES_COLUMNS`), and ``gradients``
    (`GRADIENT_COLUMNS`). ``searches``: by name the tables of
    `SEARCH_COLUMNS` that the study has."""

    runs: pd.DataFrame
    curvature: pd.DataFrame
    curves: pd.DataFrame
    spectra: dict[str, pd.DataFrame] = field(default_factory=dict)
    probes: dict[str, pd.DataFrame] = field(default_factory=dict)
    searches: dict[str, pd.DataFrame] = field(default_factory=dict)


def collect(study: str | Path) -> Results:
    """Read every run that a study lists, finished or not. Errors: ``ValueError`` where the folder is no study or a file is damaged."""
    folder = StudyFolder(study)
    record = folder.read()
    variants = record.get("variants", {})  # a run's name for what it changes is the study's: another study may call it the base
    files = [RunFiles.of(RunDirectory(folder.pool, run_id)) for run_id in record["run_ids"]]
    spectra = {name: joined(chain.from_iterable(each.read(_named(name, each.curvature)) for each in files), SPECTRA_COLUMNS[name]) for name in SPECTRA}
    probes = {name: joined(chain.from_iterable(each.read(_named(name, each.probes)) for each in files), PROBE_COLUMNS[name]) for name in PROBE_COLUMNS}
    scores = {each.directory.run_id: list(each.read(each.generation)) for each in files}
    probes["generation"] = joined(chain.from_iterable(scores.values()), PROTEIN_GENERATION_COLUMNS)
    probes["samples"] = pd.DataFrame([row for each in files for row in _sample_rows(each, scores[each.directory.run_id])], columns=SAMPLES_COLUMNS)
    probes["gradients"] = read_curves([(each.directory.run_id, each.directory.gradients_file) for each in files], GRADIENT_COLUMNS[1:])
    stopped = record.get("stopped", {})  # of a search: why it left a run
    runs = [_run_row(folder.path.name, each, scores[each.directory.run_id]) | {"variant": variants.get(each.directory.run_id, "")} for each in files]
    runs = [row | undefined_of([read_table(path) for path in _of_steps(each.curvature)]) for row, each in zip(runs, files, strict=True)]
    runs = [row | ({"reason": stopped[row["run_id"]]} if row["run_id"] in stopped else {}) for row in runs]
    return Results(
        runs=pd.DataFrame(runs, columns=RUNS_COLUMNS),
        curvature=joined(chain.from_iterable(map(_steps, files)), COLLECTED_CURVATURE_COLUMNS),
        curves=read_curves([(each.directory.run_id, each.directory.metrics_file) for each in files], CURVES_COLUMNS[1:]),
        spectra={name: frame for name, frame in spectra.items() if len(frame)},
        probes={name: frame for name, frame in probes.items() if len(frame)},
        searches=search_tables(record),
    )


def write(results: Results, folder: Path) -> None:
    """``runs``, ``curvature``, ``curves`` and what there is of spectra, probes and searches, each a parquet under ``folder`` with its schema's version."""
    frames = {name: getattr(results, name) for name in ("runs", "curvature", "curves")} | results.spectra | results.probes | results.searches
    for name, frame in frames.items():
        write_parquet(frame, folder / f"{name}.parquet", {"schema_version": str(SCHEMA_VERSION)})
    for name in (*SPECTRA, *PROBE_COLUMNS, *SEARCH_COLUMNS, "generation", "samples", "gradients"):
        if name not in frames:  # of an earlier state of the study
            (folder / f"{name}.parquet").unlink(missing_ok=True)


def graph_frame(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=GRAPH_COLUMNS[name])


def write_graphs(name: str, frame: pd.DataFrame, folder: Path) -> None:
    """``<name>.parquet`` of `GRAPH_COLUMNS` under ``folder``."""
    write_parquet(frame, folder / f"{name}.parquet", {"schema_version": str(SCHEMA_VERSION)})


def _sample_rows(files: RunFiles, scores: Sequence[pa.Table]) -> list[dict[str, Any]]:
    """The first sample of the run's last checkpoint that a report shows: the terminal one."""
    return [] if files.ended_early else sample_rows(files.directory, TERMINAL, _of_phase(scores, TERMINAL))


def _of_phase(tables: Sequence[pa.Table], phase: str) -> pa.Table | None:
    return next((table for table in tables if table["phase"][0].as_py() == phase), None)


def _run_row(study: str, files: RunFiles, scores: Sequence[pa.Table]) -> dict[str, Any]:
    status = files.status
    row: dict[str, Any] = {"study": study, "run_id": files.directory.run_id, "status": status["state"], "reason": status.get("reason", "")}
    row["num_steps"] = status.get("step", 0)
    row["last_checkpoint_step"] = files.checkpoint_steps[-1] if files.checkpoint_steps else None
    row |= _spec_columns(files.spec) if files.spec else {}
    result = {key: value for key, value in status.get("result", {}).items() if key in RUNS_COLUMNS}
    return row | result | _generative_nll(_of_phase(scores, TERMINAL))


def _generative_nll(table: pa.Table | None) -> dict[str, Any]:
    """Of the terminal checkpoint: the mean over samples of each one's nats per token of the oracle (of a protein also of its parts), and the oracle's name;
    nothing where none was scored."""
    if table is None or not len(table):
        return {}
    # a sample of one token, or of none, has no score
    scored = {name: table[name].to_pandas().dropna().to_numpy() for name in ("nll", "nll_sequence", "nll_structure") if name in table.column_names}
    means = {f"gen_{name}": values.mean() if len(values) else None for name, values in scored.items()}
    return means | {"gen_oracle": table["oracle"][0].as_py()}


def generation_tables(directory: RunDirectory) -> list[Path]:
    """The files of scored samples, a file a phase."""
    return parquet_files(directory.generation_file("").parent)


def _spec_columns(spec: dict[str, Any]) -> dict[str, Any]:
    named = {key: spec[key]["name"] for key in ("mechanism", "residual", "optimizer", "objective", "data", "model")}
    cross = spec.get("cross") or {"name": ""}  # a run older than cross mechanisms has none
    rest = {"norm": spec["norm"], "cross": cross["name"], "lr": spec["lr_peak"], "seed": spec["seed"], "planned_steps": spec.get("steps")}
    return named | rest | {"data_fingerprint": spec["data_fingerprint"]}


def step_tables(directory: RunDirectory) -> list[Path]:
    """The files of recorded steps, a file a phase, without the spectra beside them."""
    return _of_steps(parquet_files(directory.curvature_file("").parent))


def read_steps(directory: RunDirectory) -> list[pd.DataFrame]:
    """One run's recorded steps, a table a phase; a phase without any has none."""
    files = RunFiles.of(directory)
    return [table.to_pandas() for table in _steps(files)]


def read_undefined(directory: RunDirectory) -> list[tuple[str, str]]:
    """The phases and optimizer states that were asked for and that one run's optimizer does not define."""
    return [(path.stem, state) for path in _of_steps(RunFiles.of(directory).curvature) for state in undefined_states(read_table(path))]


def read_probe(directory: RunDirectory, name: str) -> pd.DataFrame:
    """One run's table of `PROBE_COLUMNS`, all its phases."""
    files = RunFiles.of(directory)
    return joined(files.read(_named(name, files.probes)), PROBE_COLUMNS[name])


def _named(table: str, paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.stem.endswith(f"_{table}")]


def _of_steps(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if not path.stem.endswith(tuple(f"_{name}" for name in SPECTRA))]


def _steps(files: RunFiles) -> Iterator[pa.Table]:
    """The run's recorded steps, a table a phase, with the step of the checkpoint and the protocol beside each row; neither where nothing is left to say it."""
    for table in files.read(_of_steps(files.curvature)):
        yield with_protocol(_with_step(files, table), files.spec)


def _with_step(files: RunFiles, table: pa.Table) -> pa.Table:
    """What was measured before there was the column has its step from the checkpoints that are there."""
    if CHECKPOINT_STEP in table.column_names:
        return table
    return table.append_column(CHECKPOINT_STEP, pa.repeat(pa.scalar(files.step_of_phase(table["phase"][0].as_py()), pa.int64()), len(table)))
