"""The interface of a sink, a place beside a run's own files that its numbers are sent to, and the guard around it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stability.runs.directory import RunDirectory, write_atomically

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # of an address in a message, which is printed and kept in a file


@dataclass(frozen=True)
class Told:
    """All that a sink is told of a run when it is opened.

    ``group``: the study; ``name``: how the run is called in it; ``config``: the run's spec; ``resume_after``: the step
    after which rows are logged again, -1 where the run begins, None where it has been trained.
    """

    directory: RunDirectory
    group: str
    name: str
    config: dict[str, Any]
    resume_after: int | None = -1

    @property
    def run_id(self) -> str:
        return self.directory.run_id


class AbstractSink(ABC):
    """A sink of one run: opened, written to, closed. Any method may raise whatever its library raises (`Guarded`).

    ``title``: how the user knows it.
    """

    title: ClassVar[str]

    @classmethod
    @abstractmethod
    def require(cls) -> None:
        """Raise a ``RuntimeError`` of one line where what the sink stands on is not installed."""

    @classmethod
    @abstractmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        """Return the settings of a study's sinks (None: this time without), and what to tell the user, "" for nothing.
        The driver asks once for all trials: what has to be looked for or made is, before workers meet there."""

    @abstractmethod
    def open(self, run: Told) -> None:
        """Begin the sink's run, or go on with it."""

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None:
        """Send a row: its ``step``, and finite numbers by their names."""

    def measured(self, row: dict[str, Any]) -> None:
        """Send a row of a checkpoint that was measured: its ``step`` may lie before others that were sent."""
        self.write(row)

    @abstractmethod
    def close(self, summary: dict[str, Any]) -> None:
        """End it, with the verdict as a tag and the result, where ``summary`` has them: {} where the run goes on
        later."""

    def substitute(self) -> AbstractSink | None:
        """Return what is opened in place of a sink that could not be, if anything."""
        return None


class Guarded:
    """A sink that can do a run no harm: whatever it raises is said once and ends the sink, never the run, whose numbers
    are in its own files anyway. It is kept in `failure_file`, too, from which the driver tells what a worker's terminal
    would have shown."""

    def __init__(self, name: str, sink: AbstractSink, run: Told):
        self._name, self._run = name, run
        failure_file(run.directory, name).unlink(missing_ok=True)
        self._sink: AbstractSink | None = sink
        while self._sink is not None and not self._guarded(lambda each: each.open(run)):
            self._sink = self._substitute(self._sink)

    def write(self, row: dict[str, Any]) -> None:
        self._with_sink(lambda sink: sink.write(row))

    def measured(self, row: dict[str, Any]) -> None:
        self._with_sink(lambda sink: sink.measured(row))

    def close(self, summary: dict[str, Any]) -> None:
        self._with_sink(lambda sink: sink.close(summary))
        self._sink = None

    def _with_sink(self, call: Callable[[AbstractSink], None]) -> None:
        if self._sink is not None and not self._guarded(call):
            self._sink = None

    def _substitute(self, sink: AbstractSink) -> AbstractSink | None:
        found: list[AbstractSink | None] = []
        return found[0] if self._guarded(lambda _: found.append(sink.substitute())) else None

    def _guarded(self, call: Callable[[AbstractSink], None]) -> bool:
        """Return whether the call went well; where it did not, one line was printed."""
        assert self._sink is not None
        try:
            call(self._sink)
            return True
        # a library raises its own errors, OSError when a service died, and classes of private modules
        except Exception as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            message = CREDENTIALS.sub("", message)
            print(f"{self._run.run_id}: {self._sink.title} failed, the run goes on ({message})", flush=True)
            write_atomically(failure_file(self._run.directory, self._name), f"{message}\n".encode())
            return False


def failure_file(directory: RunDirectory, name: str) -> Path:
    """Return the file that says why a run's sink of this name ended before the run."""
    return directory.path / f"{name}_failure.txt"
