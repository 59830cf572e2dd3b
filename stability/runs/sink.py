"""The interface of a sink, a place beside a run's own files that its numbers are sent to, and the guard around it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stability.config.identity import without_places
from stability.config.run import RunSpec
from stability.printable import print_text
from stability.runs.directory import RunDirectory, write_atomically
from stability.runs.rows import logged

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # of an address in a message, which is printed and kept in a file

BEGUN_ANEW = "it began anew, and has all rows"  # in the failure file of a sink whose substitute went on


@dataclass(frozen=True)
class Told:
    """All that a sink is told of a run when it is opened.

    ``group``: the study; ``name``: the run's name in it; ``config``: the run's spec, with the last part of each path
    alone; ``resume_after``: rows after this step are logged again; -1 for a run that begins, None for one that has been
    trained.
    """

    directory: RunDirectory
    group: str
    name: str
    config: dict[str, Any]
    resume_after: int | None = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", without_places(self.config, RunSpec))

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
    def open(self, run: Told) -> bool:
        """Begin the sink's run, or go on with it; return whether it began one."""

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
        """Return what takes the place of a sink that failed, if anything; a substitute may have one itself, so long as
        that ends."""
        return None


class Guarded:
    """A sink that can do a run no harm: whatever it raises is said, and ends the sink, never the run, whose numbers are
    in its own files anyway. Where it has a substitute, that is sent all that those files hold by then, and the call
    that failed is made again: nothing is missing there. What was raised is kept in `failure_file`, from which the
    driver tells what a worker's terminal would have shown."""

    def __init__(self, name: str, sink: AbstractSink, run: Told):
        self._name, self._run = name, run
        failure_file(run.directory, name).unlink(missing_ok=True)
        self._sink: AbstractSink | None = sink
        self._with_sink(self._begin, resent=True)

    def write(self, row: dict[str, Any]) -> None:
        """Send a row that the run's files hold already."""
        self._with_sink(lambda sink: sink.write(row), resent=True)

    def measured(self, row: dict[str, Any]) -> None:
        self._with_sink(lambda sink: sink.measured(row))

    def close(self, summary: dict[str, Any]) -> None:
        self._with_sink(lambda sink: sink.close(summary))
        self._sink = None

    def _with_sink(self, call: Callable[[AbstractSink], None], *, resent: bool = False) -> None:
        """Make a call of the sink, or of what takes its place. ``resent``: a substitute that was sent what was logged
        has all that the call would send."""
        while self._sink is not None and not self._guarded(call, self._sink):
            self._sink = self._substitute(self._sink)
            if self._sink is not None and resent:
                return

    def _substitute(self, failed: AbstractSink) -> AbstractSink | None:
        """Return the substitute of a sink that failed, open and sent what was logged; None: there is none."""
        found: list[AbstractSink | None] = []
        while self._guarded(lambda sink: found.append(sink.substitute()), failed) and found[-1] is not None:
            failed = found[-1]
            if self._guarded(self._begin_again, failed):
                self._note(BEGUN_ANEW)
                return failed
        return None

    def _begin(self, sink: AbstractSink) -> None:
        """Open the sink; one that a run gets in the middle, or after it was trained, is sent what was logged before."""
        if sink.open(self._run) and self._run.resume_after != -1:
            self._send_logged(sink)

    def _begin_again(self, sink: AbstractSink) -> None:
        sink.open(self._run)
        self._send_logged(sink)

    def _send_logged(self, sink: AbstractSink) -> None:
        for row in logged(self._run.directory):
            sink.write(row)

    def _guarded(self, call: Callable[[AbstractSink], None], sink: AbstractSink) -> bool:
        """Return whether a call of a sink went well; where it did not, one line was printed."""
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

    def _note(self, what: str) -> None:
        """Add to what the failure file says."""
        file = failure_file(self._run.directory, self._name)
        write_atomically(file, f"{file.read_text().strip()} ({what})\n".encode())


def failure_file(directory: RunDirectory, name: str) -> Path:
    """Return the file that says why a run's sink of this name ended before the run."""
    return directory.path / f"{name}_failure.txt"
