"""Logs of a run: ``metrics.jsonl``, ``timing.jsonl``, those of `LogSpec`, and optional sinks. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stability.runs.directory import RunDirectory, read_jsonl, readable_rows, write_atomically
from stability.runs.sink import AbstractSink, Guarded, Told, drop_nulls, merge_blocks

COLUMNS = ("step", "loss", "grad_norm", "update_norm", "lr", "val_nll")  # of metrics.jsonl, in every row


class JsonLines:
    """An append-only file of one JSON object per line, unbuffered.

    Each line is complete in the file before the next step begins.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 lives as long as the run; `close` closes it

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; on failure (``OSError``: a full disk) remove its written part."""
        rest, size = (json.dumps(row) + "\n").encode(), os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            self._file.truncate(size)
            raise

    def sync(self) -> None:
        """Make the rows survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self.sync()


def truncate_after(path: Path, step: int) -> None:
    """Drop the rows after ``step``, to be logged again by a resumed run.

    Damaged rows and rows with an altered step are dropped, too; up to `find_last_logged_step` there are none.
    """
    if path.exists():
        kept: dict[tuple[int, Any], str] = {}
        last = -1
        for row in readable_rows(path):
            if last <= row["step"] <= step:
                last = row["step"]
                kept.setdefault((last, row.get("block")), json.dumps(row) + "\n")
        write_atomically(path, "".join(kept.values()).encode())


def find_last_logged_step(directory: RunDirectory) -> tuple[int, str]:
    """Return (last step with a complete log up to it, later damage or "").

    Only deterministic rows count. Rows reach the disk before their checkpoint. A checkpoint beyond this step means lost
    rows; only an earlier checkpoint can reproduce them.
    """
    # metrics have one row per step, without gaps
    steps, damage = _whole_steps(directory.metrics_file, lambda last, step: step == last + 1)
    until = steps[-1] if steps else -1
    for path in directory.signal_files.values():
        blocks, of_blocks = _whole_steps(path, lambda last, step: step >= last)
        if of_blocks:  # the last step there may lack some of its blocks
            until, damage = min(until, (blocks[-1] if blocks else 0) - 1), damage or of_blocks
    return until, damage


def _whole_steps(path: Path, follows: Callable[[int, int], bool]) -> tuple[list[int], str]:
    """Return a log's steps before the first damaged or unexpected row, and the damage."""
    steps: list[int] = []
    try:
        for row in read_jsonl(path):
            if steps and not follows(steps[-1], row["step"]):
                return steps, f"{path}, line {len(steps) + 1}, is damaged: step {row['step']} after step {steps[-1]}"
            steps.append(row["step"])
    except ValueError as error:
        return steps, str(error)
    return steps, ""


SINKS = ("wandb", "tensorboard", "mlflow")  # by their names in ``logger=…``


def load_sink(name: str) -> type[AbstractSink]:
    """Return a sink's class; its file is imported on first use, its library when it opens."""
    if name == "wandb":
        from stability.runs.wandb_sink import WandbSink

        return WandbSink
    if name == "tensorboard":
        from stability.runs.tensorboard_sink import TensorboardSink

        return TensorboardSink
    from stability.runs.mlflow_sink import MlflowSink

    return MlflowSink


class Sinks:
    """The sinks of one run; all of them receive every row.

    Args:
        directory: the run's folder.
        asked: a trial's request, plain and picklable: ``to``, the settings of each sink by name, and the other fields
            of `Told`; None: no sinks.
    """

    def __init__(self, directory: RunDirectory, asked: dict[str, Any] | None = None):
        self._directory, self._asked = directory, asked
        self._open: list[Guarded] = []

    def open(self, resume_after: int | None) -> None:
        """Open all sinks, once (`Told.resume_after`)."""
        if self._open or self._asked is None:
            return
        about = {key: value for key, value in self._asked.items() if key != "to"}
        run = Told(self._directory, resume_after=resume_after, **about)
        self._open = [Guarded(name, load_sink(name)(**settings), run) for name, settings in self._asked["to"].items()]

    def write(self, row: dict[str, Any]) -> None:
        for sink in self._open:
            sink.write(drop_nulls(row))

    def write_measured(self, row: dict[str, Any]) -> None:
        for sink in self._open:
            sink.write_measured(drop_nulls(row))

    def close(self) -> None:
        """Close all open sinks, with the run's verdict and result if available."""
        summary = summary_of(self._directory) if self._open else {}
        for sink in self._open:
            sink.close(summary)
        self._open = []


def summary_of(directory: RunDirectory) -> dict[str, Any]:
    """Return verdict, reason and result of a run; {} without a verdict."""
    if not directory.finished:
        return {}
    status = directory.status()
    return {"verdict": status["state"], "reason": status["reason"], **status.get("result", {})}


class RunLog:
    """The log of one run.

    ``metrics`` takes deterministic values only, ``timing`` clocks and memory. ``sinks`` also receive the deterministic
    values; their creator closes them.
    """

    def __init__(self, directory: RunDirectory, *, resume_after: int, sinks: Sinks | None = None):
        self._signal_files = directory.signal_files
        for path in (directory.metrics_file, directory.timing_file, *self._signal_files.values()):
            truncate_after(path, resume_after)
        self._metrics, self._timing = JsonLines(directory.metrics_file), JsonLines(directory.timing_file)
        self._signals: dict[str, JsonLines] = {}
        self._sinks = sinks or Sinks(directory)
        self._sinks.open(resume_after)

    def write_metrics(self, row: dict[str, Any]) -> None:
        """Write a row: ``COLUMNS`` first (null if missing or not finite), then all other values."""
        row = dict.fromkeys(COLUMNS) | {
            name: value if value is None or math.isfinite(value) else None for name, value in row.items()
        }
        self._metrics.write(row)
        self._sinks.write(row)

    def write_timing(self, row: dict[str, Any]) -> None:
        self._timing.write(row)

    def write_signals(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write one step's rows (deterministic) of a log of `RunDirectory.signal_files`, after the step's metrics.

        The file is created with the first rows.
        """
        if name not in self._signals:
            self._signals[name] = JsonLines(self._signal_files[name])
        for row in rows:
            self._signals[name].write(row)
        self._sinks.write(merge_blocks(rows))

    def sync(self) -> None:
        """Make all rows survive a power failure, before a checkpoint relies on them."""
        for file in self._files():
            file.sync()

    def _files(self) -> list[JsonLines]:
        return [self._metrics, self._timing, *self._signals.values()]

    def close(self) -> None:
        for file in self._files():
            file.close()
