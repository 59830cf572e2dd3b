"""Run directories → three tables (parquet), the only input of the analysis. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from stability.config.ablation import value_text
from stability.runs.directory import RunDirectory, readable_rows
from stability.runs.parquet import concat_tables, join_tables, read_curves, write_parquet
from stability.runs.phases import TERMINAL
from stability.runs.run_files import RunFiles, add_protocol, undefined_of, undefined_states
from stability.runs.samples import meta_file, sample_rows
from stability.runs.schema import (
    CHECKPOINT_STEP,
    COLLECTED_CURVATURE_COLUMNS,
    COLLECTED_GENERATION_COLUMNS,
    CURVES_COLUMNS,
    GRAPH_COLUMNS,
    PROBE_COLUMNS,
    REQUIRED,
    RUNS_COLUMNS,
    SAMPLES_COLUMNS,
    SCHEMA_VERSION,
    SEARCH_COLUMNS,
    SIGNAL_COLUMNS,
    SPECTRA,
    SPECTRA_COLUMNS,
    own_columns,
)
from stability.runs.study import StudyFolder

# usual values of model parts without a column of their own
USUAL = {"ffn": "mlp", "position": "rope", "linear": "dense", "precision": "float32", "parametrization": "standard"}

# score of an objective that ranks sentences; those of step 0 are columns, too
RANKED = "val_spearman"

ParsedColumns = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Results:
    """The results of a study as pandas frames.

    Attributes:
        runs: one row per run.
        curvature: one row per recorded step (`COLLECTED_CURVATURE_COLUMNS`).
        curves: one row per training step.
        spectra: non-empty tables of `SPECTRA_COLUMNS` by name.
        probes: non-empty tables by name: those of `PROBE_COLUMNS`; ``generation``, one row per scored sample
            (`COLLECTED_GENERATION_COLUMNS`); ``samples``, the first of each run (`SAMPLES_COLUMNS`); the logs of
            `SIGNAL_COLUMNS`.
        searches: the study's tables of `SEARCH_COLUMNS` by name.
        left_out: one line per unreadable run or file.
    """

    runs: pd.DataFrame
    curvature: pd.DataFrame
    curves: pd.DataFrame
    spectra: dict[str, pd.DataFrame] = field(default_factory=dict)
    probes: dict[str, pd.DataFrame] = field(default_factory=dict)
    searches: dict[str, pd.DataFrame] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def collect(study: str | Path, parsed_columns: ParsedColumns = lambda spec: {}) -> Results:
    """Read every run of a study, finished or not; omit damaged or missing files.

    Args:
        study: the study's folder.
        parsed_columns: returns further columns of a run from its spec, by name; a run's result overrides them.

    Raises:
        ValueError: the folder is no study, or its record is damaged.
    """
    folder = StudyFolder(study)
    record = folder.read()
    files, left_out = _list_files(folder, record["run_ids"])
    broken: dict[Path, str] = {}
    spectra = {
        name: join_tables(
            chain.from_iterable(each.read(_select_table(name, each.curvature)) for each in files), SPECTRA_COLUMNS[name]
        )
        for name in SPECTRA
    }
    scores = {each.directory.run_id: list(each.read(each.generation)) for each in files}
    probes = _probe_frames(files, scores)
    for name, columns in SIGNAL_COLUMNS.items():
        logs = [(each.directory.run_id, each.directory.signal_files[name]) for each in files]
        probes[name] = read_curves(logs, columns[1:], broken)
    varied = varied_fields(record)
    rows = [
        spec_columns(each.spec, varied)
        | _run_row(folder.path.name, each, scores[each.directory.run_id], parsed_columns)
        for each in files
    ]
    curvature = _join_steps(_read_steps_of_all(files, rows))
    curves = read_curves(
        [(each.directory.run_id, each.directory.metrics_file) for each in files], CURVES_COLUMNS[1:], broken
    )
    return Results(
        runs=_runs_frame(rows, record),
        curvature=curvature,
        curves=curves,
        spectra={name: frame for name, frame in spectra.items() if len(frame)},
        probes={name: frame for name, frame in probes.items() if len(frame)},
        searches=search_tables(record),
        left_out=(*left_out, *chain.from_iterable(each.left_out.values() for each in files), *broken.values()),
    )


def _list_files(folder: StudyFolder, run_ids: Sequence[str]) -> tuple[list[RunFiles], list[str]]:
    """Return the files of runs with a readable spec, and a line per other."""
    files, left_out = [], []
    for run_id in run_ids:
        try:
            files.append(RunFiles.of(RunDirectory(folder.pool, run_id)))
        except ValueError as error:
            left_out.append(f"run {run_id}: {error}")
    return files, left_out


def _probe_frames(files: Sequence[RunFiles], scores: Mapping[str, Sequence[pa.Table]]) -> dict[str, pd.DataFrame]:
    """Return the tables of probes, scored samples and first samples by name."""
    frames = {
        name: join_tables(
            chain.from_iterable(each.read(_select_table(name, each.probes)) for each in files), PROBE_COLUMNS[name]
        )
        for name in PROBE_COLUMNS
    }
    scored = list(chain.from_iterable(scores.values()))
    own = own_columns("generation", [name for table in scored for name in table.column_names])
    frames["generation"] = join_tables(scored, [*COLLECTED_GENERATION_COLUMNS, *own])
    frames["samples"] = pd.DataFrame(
        [row for each in files for row in _sample_rows(each, scores[each.directory.run_id])], columns=SAMPLES_COLUMNS
    )
    return frames


def _runs_frame(rows: Sequence[dict[str, Any]], record: Mapping[str, Any]) -> pd.DataFrame:
    """Return the table of runs, with the study's variants and stop reasons."""
    variants, stopped = record.get("variants", {}), record.get("stopped", {})
    of_study = [
        {"variant": variants.get(row["run_id"], "")}
        | ({"reason": stopped[row["run_id"]]} if row["run_id"] in stopped else {})
        for row in rows
    ]
    whole = [row | more for row, more in zip(rows, of_study, strict=True)]
    return pd.DataFrame(whole, columns=[*RUNS_COLUMNS, *own_columns("runs", [*chain.from_iterable(whole)])])


def _recorded_steps(files: RunFiles) -> dict[Path, pa.Table]:
    """Return a run's tables of recorded steps by file."""
    spectra = tuple(f"_{name}" for name in SPECTRA)
    tables = {path: files.table(path) for path in files.curvature if not path.stem.endswith(spectra)}
    return {path: table for path, table in tables.items() if table is not None}


def write(results: Results, folder: Path) -> None:
    """Write every table as parquet under ``folder``, with the schema's version.

    Optional tables of an earlier state of the study are removed.
    """
    frames = {name: getattr(results, name) for name in REQUIRED} | results.spectra | results.probes | results.searches
    for name, frame in frames.items():
        write_parquet(frame, folder / f"{name}.parquet", {"schema_version": str(SCHEMA_VERSION)})
    for name in (*SPECTRA, *PROBE_COLUMNS, *SEARCH_COLUMNS, "generation", "samples", *SIGNAL_COLUMNS):
        if name not in frames:  # left from an earlier state of the study
            (folder / f"{name}.parquet").unlink(missing_ok=True)


def graph_frame(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=GRAPH_COLUMNS[name])


def write_graphs(name: str, frame: pd.DataFrame, folder: Path) -> None:
    """Write ``<name>.parquet`` of `GRAPH_COLUMNS`.

    Args:
        name: name of the table.
        frame: the table.
        folder: target folder.
    """
    write_parquet(frame, folder / f"{name}.parquet", {"schema_version": str(SCHEMA_VERSION)})


def _sample_rows(files: RunFiles, scores: Sequence[pa.Table]) -> list[dict[str, Any]]:
    """Return the first sample of the terminal checkpoint, for the report."""
    try:
        return [] if files.ended_early else sample_rows(files.directory, TERMINAL, _find_phase(scores, TERMINAL))
    except ValueError as error:
        files.left_out[meta_file(files.directory, TERMINAL)] = str(error)
        return []


def _find_phase(tables: Sequence[pa.Table], phase: str) -> pa.Table | None:
    return next((table for table in tables if table["phase"][0].as_py() == phase), None)


def _run_row(
    study: str,
    files: RunFiles,
    scores: Sequence[pa.Table],
    parsed_columns: ParsedColumns,
) -> dict[str, Any]:
    """Return one run's row of `RUNS_COLUMNS` from its status, spec, result and generative NLL."""
    status = files.status
    row: dict[str, Any] = {
        "study": study,
        "run_id": files.directory.run_id,
        "status": status["state"],
        "reason": status.get("reason", ""),
    }
    row["num_steps"] = status.get("step", 0)
    row["last_checkpoint_step"] = files.checkpoint_steps[-1] if files.checkpoint_steps else None
    found = status.get("result", {})
    result = {key: found[key] for key in found if key in RUNS_COLUMNS or own_columns("runs", [key])}
    result |= _initial_scores(files.directory, result)
    return row | parsed_columns(files.spec) | result | _generative_nll(_find_phase(scores, TERMINAL))


def _initial_scores(directory: RunDirectory, result: dict[str, Any]) -> dict[str, Any]:
    """Return the correlations and recalls at step 0, ``init_val_<name>``, of an objective that ranks sentences."""
    if RANKED not in result:
        return {}
    first = next(iter(readable_rows(directory.metrics_file)), {})
    own = own_columns("runs", list(result))
    return {f"init_{name}": first[name] for name in own if name.startswith("val_") and name in first}


def _generative_nll(table: pa.Table | None) -> dict[str, Any]:
    """Return the mean scores of the terminal checkpoint's samples and the oracle's name.

    Each sample's score is in nats per token of the oracle. {} if none was scored.
    """
    if table is None or not len(table):
        return {}
    # a sample of at most one token has no score
    scored = {
        name: table[name].to_pandas().dropna().to_numpy()
        for name in table.column_names
        if name == "nll" or (name.startswith("nll_") and name != "nll_per_byte")
    }
    means = {f"gen_{name}": values.mean() if len(values) else None for name, values in scored.items()}
    return means | {"gen_oracle": table["oracle"][0].as_py()}


def varied_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the fields that a study's sweep varied as sizes, from its ``study.json``."""
    return [each["field"] for each in record.get("spec", {}).get("vary", ()) if len(each["values"]) > 1]


def spec_columns(spec: dict[str, Any], varied: Sequence[str]) -> dict[str, Any]:
    """Return the columns filled by a run's spec, from plain JSON of any version.

    Args:
        spec: the run's ``spec.json``.
        varied: as `varied_fields`.
    """
    named = {key: spec[key]["name"] for key in ("mechanism", "residual", "optimizer", "objective", "data")}
    cross = spec.get("cross") or {"name": ""}  # missing in runs older than cross mechanisms
    rest = {
        "norm": spec["norm"]["name"],
        "cross": cross["name"],
        "lr": spec["lr_peak"],
        "seed": spec["seed"],
        "planned_steps": spec["steps"],
        "model": " ".join([_model_name(spec), *_sizes(spec, varied)]),
    }
    return named | rest | {"data_fingerprint": spec["data_fingerprint"]}


def _model_name(spec: dict[str, Any]) -> str:
    """Return the model's size with its unusual parts and initial weights.

    Example: ``"nano ffn=glu init=6eba02b4304b"``. Runs that differ in one of these have different names.
    """
    parts = {key: spec.get(key) or usual for key, usual in USUAL.items()}
    names = {key: part["name"] if isinstance(part, dict) else part for key, part in parts.items()}
    others = [f"{key}={name}" for key, name in names.items() if name != USUAL[key]]
    weights = spec.get("weights")
    return " ".join([spec["model"]["name"], *others, *([f"init={weights['sha256'][:12]}"] if weights else [])])


def _sizes(spec: dict[str, Any], fields: Sequence[str]) -> Iterator[str]:
    """Yield a run's values of the varied fields, e.g. ``"width=64"``, as `stability.config.scale` labels them."""
    for name in fields:
        group, _, key = name.rpartition(".")
        held = spec.get(group, {}) if group else spec
        yield f"{key}={value_text(held.get(key))}"


def read_steps(directory: RunDirectory) -> tuple[list[pd.DataFrame], list[str]]:
    """Return one run's recorded steps, and a line per unreadable file.

    The steps form one table per phase; an empty phase has none.
    """
    files = RunFiles.of(directory)
    tables = [table.to_pandas() for table in _steps(files, _recorded_steps(files))]
    return tables, list(files.left_out.values())


def read_undefined(directory: RunDirectory) -> list[tuple[str, str]]:
    """Return the requested (phase, optimizer state) pairs undefined for the run's optimizer."""
    tables = _recorded_steps(RunFiles.of(directory))
    return [(path.stem, state) for path, table in tables.items() for state in undefined_states(table)]


def read_probe(directory: RunDirectory, name: str) -> pd.DataFrame:
    """Return one run's table of `PROBE_COLUMNS`, over all phases.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    files = RunFiles.of(directory)
    found = join_tables(files.read(_select_table(name, files.probes)), PROBE_COLUMNS[name])
    for path in files.probes:
        if path in files.left_out:
            raise ValueError(files.left_out[path])
    return found


def _select_table(table: str, paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.stem.endswith(f"_{table}")]


def _read_steps_of_all(files: Sequence[RunFiles], rows: Sequence[dict[str, Any]]) -> Iterator[pa.Table]:
    """Yield the recorded steps of all runs, and add ``undefined_states`` to each run's row."""
    for each, row in zip(files, rows, strict=True):
        tables = _recorded_steps(each)
        row |= undefined_of(list(tables.values()))
        yield from _steps(each, tables)


def _join_steps(tables: Iterator[pa.Table]) -> pd.DataFrame:
    """Return all recorded steps, with the extra columns of some optimizers if present."""
    found = concat_tables(tables)
    own = [] if found is None else own_columns("curvature", found.column_names)
    return join_tables([] if found is None else [found], [*COLLECTED_CURVATURE_COLUMNS, *own])


def _steps(files: RunFiles, tables: Mapping[Path, pa.Table]) -> Iterator[pa.Table]:
    """Yield the run's recorded steps per phase, with checkpoint step and protocol if known."""
    for table in files.read(tables, tables):
        yield add_protocol(_add_step(files, table), files.spec)


def _add_step(files: RunFiles, table: pa.Table) -> pa.Table:
    """Add the checkpoint's step to tables older than this column, from existing checkpoints."""
    if CHECKPOINT_STEP in table.column_names:
        return table
    return table.append_column(
        CHECKPOINT_STEP, pa.repeat(pa.scalar(files.step_of_phase(table["phase"][0].as_py()), pa.int64()), len(table))
    )


def search_tables(record: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Return the search tables of a study's record by name."""
    return {
        name: pd.DataFrame(record[name], columns=columns)
        for name, columns in SEARCH_COLUMNS.items()
        if record.get(name)
    }
