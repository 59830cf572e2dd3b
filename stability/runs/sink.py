"""Sinks: further destinations of a run's numbers beside its files; their rows and guard, the pool's mark."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stability.config.identity import shorten_places
from stability.config.run import RunSpec
from stability.printable import print_text
from stability.runs.directory import RunDirectory, readable_rows, write_atomically

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # removed from addresses in printed and stored messages

BEGUN_ANEW = "it began anew, and has all rows"  # note in the failure file of a sink with a working substitute


@dataclass(frozen=True)
class Told:
    """A run's description for a sink at its opening.

    Attributes:
        directory: the run's folder.
        group: the study.
        name: the run's name in the study.
        config: the run's spec, with paths cut to their last part.
        resume_after: rows after this step will be logged again; -1 for a new run, None for a trained one.
    """

    directory: RunDirectory
    group: str
    name: str
    config: dict[str, Any]
    resume_after: int | None = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", shorten_places(self.config, RunSpec))

    @property
    def run_id(self) -> str:
        return self.directory.run_id


class AbstractSink(ABC):
    """A sink of one run: opened, written to, closed.

    Any method may raise any error of its library (`Guarded`). ``title`` is its name for the user.
    """

    title: ClassVar[str]

    @classmethod
    @abstractmethod
    def require(cls) -> None:
        """Raise a one-line ``RuntimeError`` if the sink's library is not installed."""

    @classmethod
    @abstractmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        """Return the settings of a study's sinks, and a message for the user.

        The settings are None if the sink is skipped this time; the message may be "". The driver calls this once for
        all trials, so that lookups and creations happen before concurrent workers start.

        Args:
            runs_dir: the pool.
            study: name of the study.
        """

    @abstractmethod
    def open(self, run: Told) -> bool:
        """Begin or resume the sink's run; return whether it is new."""

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None:
        """Send a row: ``step`` and finite numbers by name."""

    def write_measured(self, row: dict[str, Any]) -> None:
        """Send a row of a measured checkpoint; its ``step`` may be earlier than sent ones."""
        self.write(row)

    @abstractmethod
    def close(self, summary: dict[str, Any]) -> None:
        """Close the sink, with the verdict as a tag and the result.

        Args:
            summary: verdict and result; {} if the run will resume later.
        """

    def substitute(self) -> AbstractSink | None:
        """Return the substitute of this failed sink, or None.

        A substitute may have one itself, if the chain is finite.
        """
        return None


class Guarded:
    """A sink that cannot stop the run by its errors.

    An error is printed and ends only the sink; the run's own files have all numbers. A substitute first receives the
    contents of those files; then the failed call is repeated, so it lacks nothing. The error is stored in
    `failure_file` and reported by the driver: a worker's terminal is not visible.
    """

    def __init__(self, name: str, sink: AbstractSink, run: Told):
        self._name, self._run = name, run
        failure_file(run.directory, name).unlink(missing_ok=True)
        self._sink: AbstractSink | None = sink
        self._call_sink(self._begin, resent=True)

    def write(self, row: dict[str, Any]) -> None:
        """Send a row already in the run's files."""
        self._call_sink(lambda sink: sink.write(row), resent=True)

    def write_measured(self, row: dict[str, Any]) -> None:
        self._call_sink(lambda sink: sink.write_measured(row))

    def close(self, summary: dict[str, Any]) -> None:
        self._call_sink(lambda sink: sink.close(summary))
        self._sink = None

    def _call_sink(self, call: Callable[[AbstractSink], None], *, resent: bool = False) -> None:
        """Call the sink or its substitute; with ``resent`` a new substitute has the call's data already."""
        while self._sink is not None and not self._try_call(call, self._sink):
            self._sink = self._substitute(self._sink)
            if self._sink is not None and resent:
                return

    def _substitute(self, failed: AbstractSink) -> AbstractSink | None:
        """Return a failed sink's substitute, open and with all logged rows, or None."""
        found: list[AbstractSink | None] = []
        while self._try_call(lambda sink: found.append(sink.substitute()), failed) and found[-1] is not None:
            failed = found[-1]
            if self._try_call(self._begin_again, failed):
                file = failure_file(self._run.directory, self._name)
                write_atomically(file, f"{file.read_text().strip()} ({BEGUN_ANEW})\n".encode())
                return failed
        return None

    def _begin(self, sink: AbstractSink) -> None:
        """Open the sink; one opened late first receives all logged rows."""
        if sink.open(self._run) and self._run.resume_after != -1:
            self._send_logged(sink)

    def _begin_again(self, sink: AbstractSink) -> None:
        sink.open(self._run)
        self._send_logged(sink)

    def _send_logged(self, sink: AbstractSink) -> None:
        for row in read_logged_rows(self._run.directory):
            sink.write(row)

    def _try_call(self, call: Callable[[AbstractSink], None], sink: AbstractSink) -> bool:
        """Return whether a call of a sink succeeded; print one line if not."""
        try:
            call(sink)
            return True
        # a library raises its own errors, OSError when a service died, and classes of private modules
        except Exception as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            message = CREDENTIALS.sub("", message)
            print_text(f"{self._run.run_id}: {sink.title} failed, the run goes on ({message})", flush=True)
            write_atomically(failure_file(self._run.directory, self._name), f"{message}\n".encode())
            return False


def failure_file(directory: RunDirectory, name: str) -> Path:
    """Return the file with the reason of a sink's early end."""
    return directory.path / f"{name}_failure.txt"


def drop_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its nulls; a sink's chart has a gap there."""
    return {name: value for name, value in row.items() if value is not None}


def merge_blocks(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one step's block rows as one row.

    Example: ``{"step": 4, "grad_norm/blocks.0.mixer": 0.5, …}``. A row without a block is the edge's: ``slope/edge``.
    """
    found: dict[str, Any] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "block")}
        found |= {"step": row["step"]} | {f"{name}/{row.get('block', 'edge')}": value for name, value in values.items()}
    return found


def read_logged_rows(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield a run's logged rows in their original order: each step's metrics, then its signals.

    Damaged rows are omitted.
    """
    signals: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in directory.signal_files}
    for name, path in directory.signal_files.items():
        for row in readable_rows(path):
            signals[name].setdefault(row["step"], []).append(row)
    for row in readable_rows(directory.metrics_file):
        yield drop_nulls(row)
        for rows in signals.values():
            if row["step"] in rows:
                yield drop_nulls(merge_blocks(rows[row["step"]]))


MARK_FILE = "pool_mark"  # a file of the pool, unchanged by a copy or a move
MARK = re.compile(r"[0-9a-f]{8}")
WANDB_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")


def pool_mark(pool: Path) -> str:
    """Return the pool's mark, 8 random hex digits; create it if missing or damaged.

    Raises:
        OSError: the disk refused.
    """
    file = pool / MARK_FILE
    if (found := _read_mark(file)) is None:
        write_atomically(file, f"{secrets.token_hex(4)}\n".encode("ascii"))
        found = _read_mark(file)  # another process may have overwritten it
    assert found is not None, "it was just written"
    return found


def wandb_id(folder: Path, own: str, pool: Path) -> str:
    """Return the W&B id of a run or study: an existing one from its folder, else a new one.

    Args:
        folder: the folder of the run or the study.
        own: its local id, the first part of a new one.
        pool: its pool. The pool's mark is the second part, so that equal runs in two pools have two W&B ids.
    """
    return earlier_wandb_id(folder, own) or f"{own}-{pool_mark(pool)}"


def earlier_wandb_id(folder: Path, own: str) -> str | None:
    """Return the id of the W&B run in a folder, or None; it may be older than marks."""
    names = (WANDB_FOLDER.fullmatch(path.name) for path in sorted((folder / "wandb").glob("*run-*")))
    ids = [name[1] for name in names if name is not None]
    return next((each for each in reversed(ids) if each == own or each.startswith(f"{own}-")), None)


def _read_mark(file: Path) -> str | None:
    try:
        found = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return found if MARK.fullmatch(found) else None
