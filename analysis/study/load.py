"""Read a study's files into one frozen object; no other `analysis` module reads its folder.

Column names come from `stability.runs.schema`, a module without imports. Otherwise `analysis` imports from `stability`
only `printable`, `stability.primary`, `stability.runs.words`, `stability.runs.verdict` and `stability.runs.older`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.study import multiples, naming
from stability.primary import rank_mechanism
from stability.printable import line_of, shell_text, visible
from stability.runs.older import YOUNGER, OlderFile, is_older_study
from stability.runs.schema import OPTIONAL, REQUIRED, SCHEMA_VERSION, TEXT, own_columns

if TYPE_CHECKING:
    # pandas annotates results as unions of every possible type, so a type checker would report false errors everywhere
    Frame = Any
    Column = Any
else:
    Frame = pd.DataFrame
    Column = pd.Series

# table name: its probe's `what=` value, if different
PROBE_OF = {
    "filter": "spectra",
    "discrepancy": "pdmm",
    "training_free_layers": "training_free",
    "quantization_layers": "quantization",
}
THROUGHPUT_VERSION = 1  # version in `results/throughput.json` (`benchmarks.throughput.VERSION`)
# Columns by table.
COLUMNS = {name: columns for tables in (REQUIRED, *OPTIONAL.values()) for name, columns in tables.items()}

HAS_RESULT = ("stable", "spiked", "plateaued")
ENDED = (*HAS_RESULT, "diverged")
PENDING = ("queued", "running", "interrupted", "stopped")


@dataclass(frozen=True, eq=False)
class Study:
    """A study's three tables, its `study.json`, and further tables by kind and name (`schema.OPTIONAL`).

    Attributes:
        runs: with `setting`, `series`, `base` and `label` added by `naming.name_series`.
        tokenizer: folder with the structure tokenizer's results, or None.
        throughput: side-by-side measurement from `benchmarks.throughput`; {} if not measured.
    """

    name: str
    runs: Frame
    curvature: Frame
    curves: Frame
    study: dict[str, Any]
    spectra: dict[str, Frame] = field(default_factory=dict)
    probes: dict[str, Frame] = field(default_factory=dict)
    generation: dict[str, Frame] = field(default_factory=dict)
    searches: dict[str, Frame] = field(default_factory=dict)
    signals: dict[str, Frame] = field(default_factory=dict)
    tokenizer: Path | None = None
    throughput: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def series(self) -> tuple[str, ...]:
        """Every series in report order.

        Settings together, the plain residual first. Within a setting: sa sc mix sw, then others by name.
        """
        pairs = list(self.runs[["setting", "mechanism", "series"]].drop_duplicates().itertuples(index=False))
        pairs.sort(key=lambda pair: (naming.setting_rank(pair.setting), rank_mechanism(pair.mechanism)))
        return tuple(pair.series for pair in pairs)

    @property
    def reference(self) -> str:
        """The mechanism that the others are compared with: as set, else the first in report order (`sa`)."""
        names = list(dict.fromkeys(self.runs["mechanism"]))
        asked = self.study.get("reference") or self.spec.get("reference")
        return str(asked) if asked in names else min(names, key=rank_mechanism)

    @property
    def is_search(self) -> bool:
        """Whether the study is a search (`search=optuna`, `search=pbt`).

        Runs then have individual settings or are parts, and tables by learning rate and mechanism are meaningless.
        """
        return not self.searches.keys().isdisjoint({"search", "lineage"})

    @property
    def is_in_multiples(self) -> bool:
        """Whether every LR and α_max is a multiple of its optimizer's reference rate (`multiples`)."""
        return multiples.are_rates_of_their_own(self.study)

    @property
    def fingerprint(self) -> str:
        """First 12 hex digits of each data set's fingerprint."""
        known = sorted({value[:12] for value in self.runs["data_fingerprint"] if value})
        return (
            ", ".join(known)
            or str(self.study.get("provenance", {}).get("data_fingerprint") or "")[:12]
            or "not recorded"
        )

    @property
    def spec(self) -> dict[str, Any]:
        """The sweep's spec; {} if not recorded."""
        spec = self.study.get("spec")
        return spec if isinstance(spec, dict) else {}

    def of(self, series: str) -> Frame:
        """Return the runs of one series."""
        found = self._of_series.get(series)
        return self.runs.iloc[:0] if found is None else found.copy(deep=False)

    @cached_property
    def _of_series(self) -> dict[str, Frame]:
        return dict(iter(self.runs.groupby("series")))

    def with_run(self, frame: Frame) -> Frame:
        """Return a table with its runs' `series`, `mechanism`, `setting`, `seed` and LR (`run_lr`).

        ``frame``: `curvature`, `curves`, or a table in `spectra` or `probes` with run ids.
        """
        keys = self.runs[["run_id", "series", "mechanism", "setting", "seed", "lr"]].rename(columns={"lr": "run_lr"})
        return frame.merge(keys, on="run_id", how="inner")

    def probed(self, name: str) -> Frame:
        """Return one table in `probes` as `with_run` does, with ``order``: the series' position."""
        rows = self.with_run(self.probes[name])
        return rows.assign(order=rows["series"].map({series: place for place, series in enumerate(self.series)}))

    def probed_at_end(self, name: str) -> Frame:
        """Return the rows of `probed` of finished runs' terminal checkpoints.

        A run that stopped early has no trained model.
        """
        rows, finished = self.probed(name), self.runs.loc[self.runs["status"].isin(HAS_RESULT), "run_id"]
        return rows[(rows["phase"] == "terminal") & rows["run_id"].isin(finished)]

    def present(self, rows: Frame) -> list[str]:
        """Return the series in ``rows``, in the study's order."""
        known = set(rows["series"])
        return [name for name in self.series if name in known]


def load(study_dir: Path | str | Study, reference: str | None = None) -> Study:
    """Read a study's ``study.json`` and tables in ``results/``.

    The folder is ``<runs_dir>/studies/<name>``. A `Study` is returned as is, with its cached results.

    Args:
        study_dir: folder of the study.
        reference: mechanism that the others are compared with; None: as in the sweep.

    Raises:
        ValueError: a file is missing, unreadable, or has another schema version. The message is one line with the
            command to write the file. Or the study has no run of the reference.
    """
    if isinstance(study_dir, Study):
        return study_dir
    study_dir = Path(study_dir)
    manifest = _manifest(study_dir) | ({} if reference is None else {"reference": reference})
    frames = {name: _frame(study_dir, name, manifest) for name in REQUIRED}
    frames["runs"] = frames["runs"].drop_duplicates("run_id").reset_index(drop=True)
    if frames["runs"].empty:
        command = _sweep_command(study_dir, manifest)
        raise ValueError(f"{study_dir}: results/runs.parquet lists no run; `{command}` makes them")
    found = {path.stem for path in (study_dir / "results").glob("*.parquet") if path.is_file()}
    extra = {
        kind: {name: _frame(study_dir, name, manifest) for name in tables if name in found}
        for kind, tables in OPTIONAL.items()
    }  # fmt: skip
    there = dict.fromkeys(frames["runs"]["mechanism"])
    if reference is not None and reference not in there:
        raise ValueError(f"reference={reference}: no run of {study_dir.name} has it; choose of {', '.join(there)}")
    frames, extra = _name(frames, extra, manifest)
    spec: Any = manifest.get("spec") or {}
    identity = spec.get("objective", {}).get("tokenizer")
    folder = study_dir.resolve().parent.parent / "tokenizers" / str(identity) / "results"
    return Study(
        name=str(manifest.get("name") or study_dir.name),
        study=manifest,
        tokenizer=folder if identity and (folder / "summary.json").is_file() else None,
        throughput=_throughput(study_dir, naming.earlier(frames["runs"])),
        **extra,
        **frames,
    )


def of_rows(manifest: dict[str, Any], runs: Sequence[dict[str, Any]], curvature: Sequence[Frame] = ()) -> Study:
    """Return a study of runs whose tables are not written yet, for figures of a sweep in progress.

    Args:
        manifest: content of ``study.json``.
        runs: a row of ``runs.parquet`` for each run, at least one; missing columns are null.
        curvature: tables of recorded steps.
    """
    given = {"runs": [pd.DataFrame(list(runs))], "curvature": curvature, "curves": ()}
    frames = {
        name: _set_types(pd.concat(tables).reindex(columns=COLUMNS[name]) if tables else _empty(name))
        for name, tables in given.items()
    }
    frames, _ = _name({name: frame.reset_index(drop=True) for name, frame in frames.items()}, {}, manifest)
    return Study(name=str(manifest.get("name")), study=manifest, **frames)


def _empty(name: str) -> Frame:
    return pd.DataFrame(columns=COLUMNS[name])


def _name(frames: dict[str, Frame], extra: dict[str, Any], manifest: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the tables with rates in the study's unit and with the names of its series."""
    if multiples.are_rates_of_their_own(manifest):
        frames, extra = multiples.convert_tables(frames, extra, manifest)
    for axis in ("mechanism", *naming.SETTING_AXES):  # names from foreign files may hold unprintable characters
        frames["runs"][axis] = [visible(each) if isinstance(each, str) else each for each in frames["runs"][axis]]
    frames["runs"] = naming.name_series(frames["runs"], manifest)
    return frames, extra


def _throughput(study_dir: Path, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Read a study's side-by-side throughput; {} if not measured, ``ValueError`` for another version.

    ``renamed``: current series names by older files' names.
    """
    path = study_dir / "results" / "throughput.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if found is None or not _is_throughput(found):
        again = f"`python -m benchmarks.throughput {shell_text(study_dir)}` writes it again"
        raise ValueError(f"{path} holds no throughput of version {THROUGHPUT_VERSION}: {again}")
    return found | {"rows": [row | {"series": renamed.get(row["series"], row["series"])} for row in found["rows"]]}


def _is_throughput(found: Any) -> bool:
    """Return whether a file has rows from `benchmarks.throughput` in this version."""
    if not isinstance(found, dict) or found.get("version") != THROUGHPUT_VERSION or not found.get("rows"):
        return False
    return isinstance(found["rows"], list) and all(isinstance(row, dict) and "series" in row for row in found["rows"])


def _manifest(study_dir: Path) -> dict[str, Any]:
    """Read `study.json`; ``ValueError`` if missing or not a JSON object."""
    path = study_dir / "study.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: `{_sweep_command(study_dir, {})}` makes it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): `{_sweep_command(study_dir, {})}` writes it again") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} holds no JSON object: `{_sweep_command(study_dir, {})}` writes it again")
    if is_older_study(manifest):
        raise OlderFile(path)
    return manifest


def _sweep_command(study_dir: Path, manifest: dict[str, Any]) -> str:
    """Return the command that makes the study's results, as recorded in `study.json` if possible."""
    return str(manifest.get("command") or f"python -m stability.sweep name={study_dir.name}")


def _command(study_dir: Path, name: str, manifest: dict[str, Any]) -> str:
    """Return the command that writes one table."""
    place = shell_text(f"ckpt={study_dir}")
    if name in OPTIONAL["generation"]:
        return f"python -m stability.generate {place}"
    if name in OPTIONAL["probes"]:
        return f"python -m stability.probe what={PROBE_OF.get(name, name)} {place}"
    if name == "curvature" or name in OPTIONAL["spectra"]:
        return f"python -m stability.hessian {place}"
    return _sweep_command(study_dir, manifest)


def _frame(study_dir: Path, name: str, manifest: dict[str, Any]) -> Frame:
    """Read one results table; ``ValueError`` if missing, unreadable, outdated or lacking a column.

    The message has the command to write the table again.
    """
    path = study_dir / "results" / f"{name}.parquet"
    command = _command(study_dir, name, manifest)
    if not path.is_file():
        raise ValueError(f"{path} is missing: `{command}` makes it")
    try:
        table = pq.read_table(path)
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = line_of(error)
        raise ValueError(f"{path} is no parquet file ({why}): `{command}` writes it again") from None
    version = _schema_version(table.schema.metadata or {})
    if version != SCHEMA_VERSION:
        found = "no schema version" if version is None else f"schema version {version}"
        raise ValueError(
            f"{path} has {found}, this analysis reads version {SCHEMA_VERSION}: `{command}` writes it again"
        )
    columns = [*COLUMNS[name], *own_columns(name, table.column_names)]
    if lacking := [column for column in columns if column not in table.column_names]:
        if set(lacking) <= set(YOUNGER.get(name, ())):
            raise OlderFile(path)
        raise ValueError(
            f"{path} lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}: `{command}` writes it again"
        )
    return _set_types(table.select(columns).replace_schema_metadata(None).to_pandas())


def _schema_version(metadata: dict[bytes, bytes]) -> int | None:
    """Read the schema version from the file's own key or pandas' attributes; None without either."""
    raw, attributes = metadata.get(b"schema_version"), metadata.get(b"PANDAS_ATTRS", b"{}")
    try:
        raw = json.loads(attributes).get("schema_version") if raw is None else raw
        return None if raw is None else int(raw)
    except (ValueError, TypeError, AttributeError):
        return None


def _set_types(frame: Frame) -> Frame:
    """Return text columns as str ("" for null) and all others as float64 (NaN for null)."""
    # an all-null column has no type in parquet, so types are set here
    columns = {
        column: _text(frame[column])
        if column in TEXT
        else pd.Series(pd.to_numeric(frame[column], errors="coerce"), dtype="float64")
        for column in frame.columns
    }
    return pd.DataFrame(columns)


def _text(column: Column) -> Column:
    """Return a column as str, "" for null."""
    # most values repeat, so each distinct one is converted once
    codes, values = pd.factorize(column)
    known = np.array(["", *map(str, values)], dtype=object)  # a null has code -1, hence the + 1
    return pd.Series(known[codes + 1], index=column.index, dtype=object)


def phase_rank(phase: str) -> tuple[bool, tuple[tuple[str, float], ...]]:
    """Return a sort key for phases: terminal, earliest, then others by step."""
    return phase != "terminal", naming.natural(phase)
