"""Tables in a run's folder, each with the phase of its checkpoint, and the metadata of recorded steps. No torch.

Older code without the phase `last` labelled a run's last checkpoint terminal, even of an incomplete run, and labelled a
single checkpoint with both phases. Its files stay unchanged; their rows are read under the correct phase.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from stability.runs.directory import CHECKPOINT, FINISHED, RunDirectory, read_json, step_of
from stability.runs.parquet import read_table
from stability.runs.phases import EARLIEST, LAST, TERMINAL
from stability.runs.records import TabulatedSpec
from stability.runs.schema import PROTOCOL, own_settings

NOTHING_READ: Mapping[Path, pa.Table] = MappingProxyType({})


@dataclass(frozen=True)
class RunFiles:
    """A run's spec, status and tables; each folder is listed once.

    Attributes:
        directory: the run's folder.
        spec: its spec as plain JSON.
        status: its status.
        checkpoint_steps: steps of its checkpoints, rising.
        curvature: tables of recorded steps and spectra.
        probes: tables of probes.
        generation: tables of scored samples.
        left_out: damaged or foreign files with reasons; it grows during reading.
    """

    directory: RunDirectory
    spec: dict[str, Any]
    status: dict[str, Any]
    checkpoint_steps: tuple[int, ...]
    curvature: tuple[Path, ...]
    probes: tuple[Path, ...]
    generation: tuple[Path, ...]
    left_out: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: RunDirectory) -> RunFiles:
        """List a run's files.

        Raises:
            ValueError: the spec is missing or damaged; the message names it.
        """
        spec = read_json(directory.spec_file, TabulatedSpec)
        folders = [
            path.parent
            for path in (directory.curvature_file(""), directory.probe_file("", ""), directory.generation_file(""))
        ]
        steps = tuple(step_of(path) for path in directory.checkpoints())
        curvature, probes, generation = (tuple(parquet_files(folder)) for folder in folders)
        status = directory.status()
        damage = directory.status_damage() if status["state"] == "failed" else ""
        left_out = {directory.status_file: f"{damage}; its run counts as failed"} if damage else {}
        return cls(directory, spec, status, steps, curvature, probes, generation, left_out)

    @property
    def ended_early(self) -> bool:
        """Whether the run stopped before its last planned step.

        The verdict decides or, without a verdict, the checkpoints.
        """
        if self.status["state"] in FINISHED:
            return self.status["state"] == "diverged"
        return bool(self.checkpoint_steps) and self.checkpoint_steps[-1] < self.spec["steps"]

    def step_of_phase(self, phase: str) -> int | None:
        """Return the step of a phase's checkpoint; None if no checkpoint is left."""
        if phase == TERMINAL:
            return self.spec["steps"]
        if CHECKPOINT.match(phase):
            return step_of(Path(phase))
        return (
            {EARLIEST: self.checkpoint_steps[0], LAST: self.checkpoint_steps[-1]}.get(phase)
            if self.checkpoint_steps
            else None
        )

    def table(self, path: Path) -> pa.Table | None:
        """Read a table; None if it is left out."""
        if path in self.left_out:
            return None
        try:
            found = read_table(path)
        except (ValueError, FileNotFoundError) as error:
            self.left_out[path] = str(error)
            return None
        if "phase" not in found.column_names:
            self.left_out[path] = f"{path} is no table of ours (it has no column phase); move it away"
        elif why := damage_of(found):
            self.left_out[path] = f"{path} is damaged ({why}); move it away and measure again"
        return None if path in self.left_out else found

    def read(self, paths: Iterable[Path], known: Mapping[Path, pa.Table] = NOTHING_READ) -> Iterator[pa.Table]:
        """Yield the non-empty tables, each under its correct phase; each checkpoint once.

        Args:
            paths: files to read.
            known: tables already read.
        """
        for path in paths:
            table = known[path] if path in known else self.table(path)
            if table is None:
                continue
            phase = self._phase(path, table) if len(table) else None
            if phase is not None:
                yield table.set_column(
                    table.column_names.index("phase"), "phase", pa.repeat(pa.scalar(phase), len(table))
                )

    def _phase(self, path: Path, table: pa.Table) -> str | None:
        """Return the correct phase of a table's rows, or None for a duplicate."""
        written, early = table["phase"][0].as_py(), self.ended_early
        if written not in (TERMINAL, EARLIEST):
            return written
        if early and written == TERMINAL and _name_of_phase(path, written, LAST).exists():
            return None
        right, wrong = (EARLIEST, TERMINAL) if early else (TERMINAL, EARLIEST)
        if written == wrong and self._is_duplicate(table, _name_of_phase(path, written, right)):
            return None
        return LAST if early and written == TERMINAL else written

    def _is_duplicate(self, table: pa.Table, other: Path) -> bool:
        """Return whether another phase's table is a duplicate.

        It is if the run has only one checkpoint, or no checkpoint is left and the numbers are equal.
        """
        if len(self.checkpoint_steps) > 1 or not other.exists():
            return False
        found = self.table(other)
        if found is None or self.checkpoint_steps or not len(found):
            return bool(found is not None and len(found))
        frames = [each.to_pandas().drop(columns="phase") for each in (table, found)]
        return list(frames[0]) == list(frames[1]) and frames[0].equals(frames[1])


def parquet_files(folder: Path) -> list[Path]:
    """Return the parquet files of a folder by name; [] if the folder is missing."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".parquet")
    except FileNotFoundError:
        return []


def _name_of_phase(path: Path, written: str, phase: str) -> Path:
    """Return the same table's file of another phase."""
    return path.with_name(phase + path.name.removeprefix(written))


# metadata key: JSON list of the requested states undefined for the run's optimizer
UNDEFINED = "undefined"
# metadata key, optional: JSON object about the optimizer's step, with its "name"
OPTIMIZER = "optimizer"


def damage_of(table: pa.Table) -> str:
    """Return the damage of a table's metadata, or ""."""
    kinds = {PROTOCOL: dict, UNDEFINED: list, OPTIMIZER: dict}
    for key, text in (table.schema.metadata or {}).items():
        kind = kinds.get(key.decode(errors="replace"))
        try:
            is_right = kind is None or isinstance(json.loads(text), kind)
        except (ValueError, RecursionError):
            is_right = False
        if not is_right:
            return f"its {key.decode()} is no JSON {'list' if kind is list else 'object'}"
    stored = _read_protocol(table) or {"state": []}
    if "state" in table.column_names and not isinstance(stored.get("state"), list):
        return "its protocol names no states"
    return ""


def add_protocol(table: pa.Table, spec: dict[str, Any]) -> pa.Table:
    """Return a table of recorded steps with its protocol in each row.

    The protocol is null if the file is too old to contain it.

    Args:
        table: the recorded steps.
        spec: the run's spec as plain JSON.
    """
    stored = _read_protocol(table)
    told = (table.schema.metadata or {}).get(OPTIMIZER.encode())
    step = {} if told is None else {OPTIMIZER: json.loads(told)}
    protocol = None if stored is None else json.dumps(_complete_protocol(stored, spec) | step, sort_keys=True)
    # older than the column: all states used the same gradient
    if stored is not None and "gradient" not in table.column_names:
        table = table.append_column(
            "gradient", pa.repeat(pa.scalar(stored.get("gradient", "true"), pa.string()), len(table))
        )
    return table.append_column(PROTOCOL, pa.repeat(pa.scalar(protocol, pa.string()), len(table)))


def undefined_of(tables: Sequence[pa.Table]) -> dict[str, str]:
    """Return ``undefined_states`` of a run, names joined by spaces; {} if none."""
    found = {state for table in tables for state in undefined_states(table)}
    return {"undefined_states": " ".join(sorted(found))} if found else {}


def undefined_states(table: pa.Table) -> list[str]:
    """Return the requested optimizer states undefined for the run's optimizer.

    An older file without this entry lacks exactly the rows of these states.
    """
    told = (table.schema.metadata or {}).get(UNDEFINED.encode())
    if told is not None:
        return json.loads(told)
    stored = _read_protocol(table)
    if stored is None or not len(table):
        return []
    measured = set(table["state"].to_pylist())
    return [state for state in stored["state"] if state not in measured]


def _read_protocol(table: pa.Table) -> dict[str, Any] | None:
    text = (table.schema.metadata or {}).get(PROTOCOL.encode())
    return None if text is None else json.loads(text)


def _complete_protocol(protocol: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    own = own_settings(protocol, spec)
    dropout = spec.get("model", {}).get("dropout", 0.0)  # it affected only u
    return protocol | own | ({"dropout": dropout} if dropout else {})
