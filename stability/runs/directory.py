"""The files of one run, each written atomically."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stability.config.base import Settings
from stability.config.identity import is_same_run
from stability.config.run import RunSpec
from stability.runs.leftovers import name_temporary, remove
from stability.runs.older import BARE, OlderFile, is_older_spec
from stability.runs.records import Record, StatusFile

FINISHED = ("stable", "spiked", "plateaued", "diverged")
TAIL_BYTES = 8192
CHECKPOINT = re.compile(r"step_(\d{6,})")
STOPPED = "stopped"  # at a rung of a search: resumable, no result
# between two steps, by Ctrl-C or the end of a job: saved, resumed by the same command
INTERRUPTED = "interrupted"
RUNNING = "running"  # without a live owner: the process was killed; the same command resumes
# paths of code outside the user's: packages, the standard library, frozen and compiled code
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<")
RUN_AGAIN = "move it away and run the sweep again"
STATES = ("queued", RUNNING, *FINISHED, STOPPED, INTERRUPTED, "failed")


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` atomically: temporary name, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = name_temporary(path)
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it replaces ``folder`` when the ``with`` block ends.

    If the block raises, ``folder`` stays as it was.
    """
    aside, old = name_temporary(folder), name_temporary(folder.with_name(f"{folder.name}.gone"))
    for path in (aside, old):
        remove(path)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            fsync(path)
        if folder.exists():
            folder.replace(old)  # a folder that is not empty cannot be replaced in one step
        aside.replace(folder)
        fsync(folder.parent)
    finally:
        if old.exists() and not folder.exists():  # interrupted between the two renames
            old.replace(folder)
        for path in (aside, old):
            remove(path)


def mtime_ns(path: Path | str) -> int:
    """Return a file's time of modification in nanoseconds; 0 without the file."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116  # thousands of files a second, and Path objects are slow
    except OSError:
        return 0


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path, record: type[Record] | None = None, remedy: str = RUN_AGAIN) -> Any:
    """Return the object of a JSON file.

    Args:
        path: a file of ours.
        record: required fields (`stability.runs.records`), checked.
        remedy: advice for the user of a damaged file.

    Raises:
        OlderFile: an older version wrote it, and ``record`` is given.
        ValueError: the file is missing, damaged, or no object; the message names it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no {path.name} in {path.parent}; is this a folder that a sweep wrote?") from None
    except (ValueError, RecursionError) as error:
        raise make_damage_error(path, str(error), remedy) from None
    if not isinstance(found, dict):
        raise make_damage_error(path, f"it holds a {type(found).__name__} instead of an object", remedy)
    if record is not None:
        try:
            record.model_validate(found)
        except ValidationError as error:
            # an older file may be damaged, too, which no upgrade mends
            if not {each["loc"] for each in error.errors()} <= {
                (key,) for key in BARE if isinstance(found.get(key), str)
            }:
                raise make_damage_error(path, _describe_first(error), remedy) from None
        if record.is_older(found):
            raise OlderFile(path)
    return found


def _describe_first(error: ValidationError) -> str:
    """Return the first invalid field and the reason."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def make_damage_error(path: Path, why: str, remedy: str = RUN_AGAIN) -> ValueError:
    """Return the error for a damaged file of ours.

    Args:
        path: the file.
        why: the damage.
        remedy: advice for the user.
    """
    return ValueError(f"{path} is damaged ({why}); {remedy}")


class RunDirectory:
    """A run's folder ``<pool>/<run_id>``: its file names, status and checkpoints."""

    def __init__(self, pool: str | Path, run_id: str):
        self.run_id = run_id
        self.path = Path(pool) / run_id
        self.spec_file = self.path / "spec.json"
        self.provenance_file = self.path / "provenance.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.timing_file = self.path / "timing.jsonl"
        self.curvature_timing_file = self.path / "curvature_timing.jsonl"
        self.gradients_file = self.path / "gradients.jsonl"
        self.activations_file = self.path / "activations.jsonl"
        self.edge_file = self.path / "edge.jsonl"
        self.status_file = self.path / "status.json"
        self.traceback_file = self.path / "traceback.txt"

    @property
    def signal_files(self) -> dict[str, Path]:
        """Logs with rows at some steps only (`LogSpec`), by name, in the order of writing."""
        return {"gradients": self.gradients_file, "activations": self.activations_file, "edge": self.edge_file}

    @classmethod
    def at(cls, path: str | Path) -> RunDirectory:
        return cls(Path(path).parent, Path(path).name)

    def curvature_file(self, phase: str) -> Path:
        return self.path / "curvature" / f"{phase}.parquet"

    def probe_file(self, phase: str, table: str) -> Path:
        return self.path / "probes" / f"{phase}_{table}.parquet"

    def generation_file(self, phase: str) -> Path:
        """Return the file of the samples' scores; the samples are under ``samples/``."""
        return self.path / "generation" / f"{phase}.parquet"

    def write_spec(self, spec: dict[str, Any], schema: type[Settings] = RunSpec) -> None:
        """Write ``spec.json`` once, or again if it is unreadable.

        A later spec may differ in data paths and other values outside the id.

        Args:
            spec: the spec as plain JSON.
            schema: class of the spec.

        Raises:
            OlderFile: the folder has this run's spec of an older version.
            ValueError: the folder has another run's spec.
        """
        try:
            found = read_json(self.spec_file)
        except ValueError:  # missing or damaged: the folder's name identifies the run
            found = None
        if found is None:
            try:
                write_json(self.spec_file, spec)
            # a process that acquired the run's lock just now removed the temporary file as a leftover
            except FileNotFoundError:
                write_json(self.spec_file, spec)
            found = read_json(self.spec_file)
        if is_older_spec(found):
            raise OlderFile(self.spec_file)
        # mostly equal, which takes a hundredth of the time to see
        if found != json.loads(json.dumps(spec)) and not is_same_run(found, spec, schema):
            raise ValueError(f"{self.spec_file} is the spec of another run; move that folder away")

    def status(self) -> dict[str, Any]:
        """Return the last status; ``{"state": "queued"}`` before the first.

        A damaged status counts as failed, with the file in its reason; the same command resumes from the last intact
        checkpoint.
        """
        try:
            changed_at = self.status_file.stat().st_mtime
        except FileNotFoundError:
            return {"state": "queued", "step": 0}
        try:
            found = self._stored_status()
        except ValueError as error:
            found = {"state": "failed", "step": 0, "reason": str(error)}
        return {"changed_at": changed_at, **found}

    def status_damage(self) -> str:
        """Return the damage of the status file with its name; "" if it is intact or missing."""
        if self.status_file.exists():
            try:
                self._stored_status()
            except ValueError as error:
                return str(error)
        return ""

    def _stored_status(self) -> dict[str, Any]:
        found = read_json(self.status_file, StatusFile)
        if found["state"] not in STATES:
            raise make_damage_error(self.status_file, "state: no state of a run")
        return found

    def set_status(self, state: str, *, step: int, reason: str = "", **more: Any) -> None:
        """Write the status with this process as its owner.

        Args:
            state: one of ``STATES``.
            step: last step of the run.
            reason: reason of the state, "" for none.
            **more: further fields.
        """
        assert state in STATES, state
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        write_json(
            self.status_file,
            {"state": state, "step": step, "reason": reason, "owner": owner, "changed_at": time.time(), **more},
        )

    def fail(self, reason: str, account: str, num_steps: int) -> None:
        """Set the status ``failed`` at the last logged step, and store the traceback.

        An earlier training result is retained, as after a crash of its measurement.

        Args:
            reason: one line.
            account: the traceback.
            num_steps: planned steps of the run.

        Raises:
            OSError: the disk refused; the message names the run.
        """
        rows = read_tail(self.metrics_file)
        result = self.status().get("result")
        kept = {"result": result} if result else {}
        step = rows[-1]["step"] if rows else 0
        try:
            write_atomically(self.traceback_file, account.encode())
            self.set_status("failed", step=step, reason=reason[:500], num_steps=num_steps, **kept)
        except OSError as error:
            why = f"{error.strerror or error}; the run failed and that could not be written down ({reason[:200]})"
            raise OSError(error.errno, why, str(self.path)) from error

    def find_raising_line(self) -> str:
        """Return the source line of the last failure; "" if there is none.

        Format: ``FILE:LINE, in FUNCTION: CODE``, of the last frame outside installed packages.
        """
        try:
            traceback = self.traceback_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        frames = re.findall(r'^ +File "(.+)", line (\d+), in (.+)\n(?: {4}(.*)\n)?', traceback, re.MULTILINE)
        own = [frame for frame in frames if not INSTALLED.search(frame[0])]
        return "{}:{}, in {}: {}".format(*own[-1]) if own else ""

    @property
    def has_rows(self) -> bool:
        """Whether any step was logged."""
        return self.metrics_file.is_file() and self.metrics_file.stat().st_size > 0

    @property
    def finished(self) -> bool:
        return self.status()["state"] in FINISHED

    def checkpoints(self) -> list[Path]:
        """List complete checkpoints by step.

        Folders with temporary names (still being written) and backups (``step_000012 (copy)``) are excluded.
        """
        folder = self.path / "checkpoints"
        try:
            with os.scandir(folder) as entries:
                found = [entry.name for entry in entries if CHECKPOINT.fullmatch(entry.name) and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((folder / name for name in found), key=step_of)


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint, ``step_000200``.

    Names get longer from a million steps on, so sort them by `step_of`.
    """
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's folder name, also of a copy ``step_000012_backup``."""
    if match := CHECKPOINT.match(folder.name):
        return int(match[1])
    raise ValueError(f"{folder} has no name of a checkpoint, like {checkpoint_name(200)}")


def read_jsonl(path: Path, numbers: Sequence[str] = ("step",)) -> Iterator[dict[str, Any]]:
    """Yield the rows of a log; a truncated last line is omitted.

    Args:
        path: a file with one JSON object per line; a missing file has no rows.
        numbers: fields that must be finite numbers in each row; ``step`` must be whole.

    Raises:
        ValueError: a line is damaged; the message names file and line.
    """
    for number, row in _parse_rows(path, numbers):
        if isinstance(row, str):
            raise ValueError(describe_damage(path, number, row))
        yield row


def rows_before_damage(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return a log's rows before its first damaged line, and the damage or ""."""
    rows: list[dict[str, Any]] = []
    for number, row in _parse_rows(path, ("step",)):
        if isinstance(row, str):
            return rows, describe_damage(path, number, row)
        rows.append(row)
    return rows, ""


def describe_damage(path: Path, number: int, why: str) -> str:
    """Return the message about a damaged line of a log.

    Args:
        path: the log.
        number: number of the line, from 1.
        why: the damage.
    """
    return f"{path}, line {number}, is damaged: {why}"


def readable_rows(path: Path, numbers: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """Return the undamaged rows of a log, for clocks and displays; arguments as in `read_jsonl`."""
    return [row for _, row in _parse_rows(path, numbers) if not isinstance(row, str)]


def _parse_rows(path: Path, numbers: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each line's number with its row or its damage."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, _parse_row(line, numbers)
            elif b"\0" in line:
                yield number, "it holds zeros, as a power failure leaves them"


def _parse_row(line: bytes, numbers: Sequence[str]) -> dict[str, Any] | str:
    """Return a line's row or its damage."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(row, dict):
        return f"it is a {type(row).__name__} instead of an object"
    for name in numbers:
        value = row.get(name)
        if type(value) is int and abs(value) < 2**63:
            continue
        if name == "step" or type(value) is not float or not math.isfinite(value):
            return f"{name}: no {'whole ' if name == 'step' else ''}number"
    return row


def read_tail(path: Path, num_bytes: int = TAIL_BYTES, numbers: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """Return the last complete, undamaged rows of a log; [] if none.

    Args:
        path: as in `read_jsonl`.
        num_bytes: bytes to read from the end, at most.
        numbers: as in `read_jsonl`.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            block = file.read()
    except FileNotFoundError:
        return []
    lines = block.split(b"\n")[:-1]  # the part after the last newline is still being written
    rows = (_parse_row(line, numbers) for line in (lines[1:] if size > num_bytes else lines))
    return [row for row in rows if not isinstance(row, str)]
