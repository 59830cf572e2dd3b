"""Name what one run leaves on disk, and keep the rules by which it changes: everything is written whole or not at
all."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stability.config.base import Settings
from stability.config.identity import same_run
from stability.config.run import RunSpec
from stability.runs.leftovers import temporary

FINISHED = ("stable", "spiked", "plateaued", "diverged")
TAIL_BYTES = 8192
STOPPED = "stopped"  # at a rung of a search: resumable, and no result
# between two steps, by Ctrl-C or the end of a job: saved, and gone on with by the same command
INTERRUPTED = "interrupted"
RUNNING = "running"  # with nobody at it: its process was killed, and the same command goes on
# where code lies that is not the user's: packages, the standard library, frozen and compiled code
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<")
STATES = ("queued", RUNNING, *FINISHED, STOPPED, INTERRUPTED, "failed")


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace ``path`` by ``data``, or leave it as it was: temporary name, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary(path)
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


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the object of a JSON file. ``ValueError`` names the file where it is missing, damaged, or holds something
    else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no {path.name} in {path.parent}; is this a folder that a sweep wrote?") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, f"it holds a {type(found).__name__} instead of an object")
    return found


def damaged(path: Path, why: str) -> ValueError:
    """Return the error that is raised of a file of ours that is not as it was written."""
    return ValueError(f"{path} is damaged ({why}); move it away and run the sweep again")


class RunDirectory:
    """A run's folder ``<pool>/<run_id>``: names of its files, its status, its checkpoints."""

    def __init__(self, pool: str | Path, run_id: str):
        self.run_id = run_id
        self.path = Path(pool) / run_id
        self.spec_file = self.path / "spec.json"
        self.provenance_file = self.path / "provenance.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.timing_file = self.path / "timing.jsonl"
        self.curvature_timing_file = self.path / "curvature_timing.jsonl"
        self.gradients_file = self.path / "gradients.jsonl"
        self.status_file = self.path / "status.json"
        self.traceback_file = self.path / "traceback.txt"

    @classmethod
    def at(cls, path: str | Path) -> RunDirectory:
        return cls(Path(path).parent, Path(path).name)

    def curvature_file(self, phase: str) -> Path:
        return self.path / "curvature" / f"{phase}.parquet"

    def probe_file(self, phase: str, table: str) -> Path:
        return self.path / "probes" / f"{phase}_{table}.parquet"

    def generation_file(self, phase: str) -> Path:
        """Return the file of the samples' scores; the samples themselves lie under ``samples/``."""
        return self.path / "generation" / f"{phase}.parquet"

    def write_spec(self, spec: dict[str, Any], schema: type[Settings] = RunSpec) -> None:
        """Write ``spec.json`` once; from then on where the data lie may differ, and what else is outside of the id.
        ``schema``: the class of which ``spec`` holds the plain values. ``ValueError`` where the folder holds another
        run's spec."""
        if not self.spec_file.exists():
            try:
                write_json(self.spec_file, spec)
            # whoever got the run's lock in this moment took the file being written for a leftover
            except FileNotFoundError:
                write_json(self.spec_file, spec)
        if not same_run(read_json(self.spec_file), spec, schema):
            raise ValueError(f"{self.spec_file} holds another spec than the one to run; move that folder away")

    def status(self) -> dict[str, Any]:
        """Return the last status; ``{"state": "queued"}`` where none was written yet."""
        if not self.status_file.exists():
            return {"state": "queued", "step": 0}
        found = read_json(self.status_file)
        if found.get("state") not in STATES or not isinstance(found.get("step"), int):
            raise damaged(self.status_file, "it names no state and step of a run")
        return found

    def set_status(self, state: str, *, step: int, reason: str = "", **more: Any) -> None:
        assert state in STATES, state
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        write_json(
            self.status_file,
            {"state": state, "step": step, "reason": reason, "owner": owner, "changed_at": time.time(), **more},
        )

    def fail(self, reason: str, account: str, num_steps: int) -> None:
        """Set the status ``failed`` at the last logged step, with ``account`` in the traceback's file. What training
        gave before a crash in what follows it stays."""
        write_atomically(self.traceback_file, account.encode())
        rows = tail(self.metrics_file)
        try:
            result = self.status().get("result")
        except ValueError:  # the status itself is what is damaged
            result = None
        kept = {"result": result} if result else {}
        self.set_status(
            "failed", step=rows[-1]["step"] if rows else 0, reason=reason[:500], num_steps=num_steps, **kept
        )

    def raised_at(self) -> str:
        """Return the line that raised in the last failure, of the last frame outside of installed packages:
        ``FILE:LINE, in FUNCTION: CODE``; "" where there is none."""
        try:
            traceback = self.traceback_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        frames = re.findall(r'^ +File "(.+)", line (\d+), in (.+)\n(?: {4}(.*)\n)?', traceback, re.MULTILINE)
        own = [frame for frame in frames if not INSTALLED.search(frame[0])]
        return "{}:{}, in {}: {}".format(*own[-1]) if own else ""

    @property
    def has_rows(self) -> bool:
        """Whether a step of the run was logged."""
        return self.metrics_file.is_file() and self.metrics_file.stat().st_size > 0

    @property
    def finished(self) -> bool:
        return self.status()["state"] in FINISHED

    def checkpoints(self) -> list[Path]:
        """List complete checkpoints by step; folders still being written have temporary names and are not among
        them."""
        return sorted((self.path / "checkpoints").glob("step_[0-9]*"), key=step_of)


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint, ``step_000200``. From a million steps on it is longer: names sort as
    their steps only by `step_of`."""
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, by its folder's name."""
    return int(folder.name.removeprefix("step_"))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a log. A last line that a crash cut short is left out; damage anywhere else raises
    ``ValueError``."""
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is damaged: {error}") from None


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the last whole lines of a log, parsed, reading no more than ``num_bytes`` of it; [] where there is
    none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            block = file.read()
    except FileNotFoundError:
        return []
    lines = block.split(b"\n")[:-1]  # what follows the last newline is still being written
    return [json.loads(line) for line in (lines[1:] if size > num_bytes else lines)]
