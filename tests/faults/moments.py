"""Kills that land where they hurt: writers that stop in the middle of what they write, when told to, and say where they
stand.

The parent leaves an order in a folder (`Orders`); the next process that begins the operation takes it, stops at the
stage that it names, leaves word, and sleeps until it is killed. The product has no hooks for this: its functions are
wrapped in the child.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.trial import Trial, run_trial

OPERATIONS = ("checkpoint", "metrics", "status")
STAGES = {"checkpoint": 20, "metrics": 2, "status": 6}  # how often `Stop.here` is passed in one operation
FOLDER = "KILL_STORM"


@dataclass(frozen=True)
class Reached:
    """A process that stands still inside an operation."""

    pid: int
    operation: str
    stage: str
    path: str


class Orders:
    """The parent's side: one order at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def give(self, operation: str, stage: int) -> None:
        self._number += 1
        aside = self._folder / "aside"
        aside.write_text(json.dumps({"operation": operation, "stage": stage, "number": self._number}))
        aside.replace(self._folder / "order")

    def reached(self) -> Reached | None:
        try:
            return Reached(**json.loads((self._folder / f"reached-{self._number}").read_text()))
        except FileNotFoundError:
            return None

    def withdraw(self) -> None:
        (self._folder / "order").unlink(missing_ok=True)


class Stop:
    """The child's side, for the operation that this process is in."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._order: dict[str, Any] | None = None
        self._passed = 0
        self._path = ""

    def begin(self, operation: str, path: Path) -> None:
        """Take the order, if there is one and it is for this operation; of several processes one gets it."""
        try:
            order = json.loads((self._folder / "order").read_text())
            if order["operation"] != operation:
                return
            (self._folder / "order").rename(self._folder / f"taken-{order['number']}")
        except FileNotFoundError:
            return
        self._order, self._passed, self._path = order, 0, str(path)

    def here(self, stage: str, last: bool = False) -> None:
        if self._order is None:
            return
        self._passed += 1
        if self._passed <= self._order["stage"] and not last:
            return
        reached = Reached(os.getpid(), self._order["operation"], stage, self._path)
        aside = self._folder / f"aside-{os.getpid()}"
        aside.write_text(json.dumps(reached.__dict__))
        aside.rename(self._folder / f"reached-{self._order['number']}")
        while True:
            time.sleep(3600)


class Halved:
    """A log's file that takes each row in two halves."""

    def __init__(self, file: Any, stop: Stop):
        self._file, self._stop = file, stop

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        self._stop.here("half of a row")
        return len(data) // 2 + self._file.write(data[len(data) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self._file.__enter__()

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


def stormed(trial: Trial) -> Iterator[None]:
    """`run_trial` in a process whose writers can be stopped."""
    _wrap_once(os.environ[FOLDER])
    yield from run_trial(trial)


@functools.cache
def _wrap_once(folder: str) -> None:
    from stability.runs.directory import RunDirectory
    from stability.runs.log import JsonLines
    from stability.training import checkpoint

    stop = Stop(Path(folder))
    checkpoint.save = _around(checkpoint.save, "checkpoint", stop, lambda arguments: arguments[0])
    RunDirectory.set_status = _around(
        RunDirectory.set_status, "status", stop, lambda arguments: arguments[0].status_file
    )
    for module, name in (
        (checkpoint, "save_file"),
        (checkpoint.torch, "save"),
        (checkpoint.shutil, "rmtree"),
        (os, "fsync"),
        (Path, "replace"),
    ):
        setattr(module, name, _passed(getattr(module, name), name, stop))
    begin, write = JsonLines.__init__, JsonLines.write

    def init(self: JsonLines, path: Path) -> None:
        begin(self, path)
        if path.name == "metrics.jsonl":
            self.path = path
            self._file = Halved(self._file, stop)

    def write_row(self: JsonLines, row: dict[str, Any]) -> None:
        if hasattr(self, "path"):
            stop.begin("metrics", self.path)
        write(self, row)
        if hasattr(self, "path"):
            stop.here("after the row", last=True)

    JsonLines.__init__, JsonLines.write = init, write_row


def _around(function: Callable, operation: str, stop: Stop, path_of: Callable[[tuple], Path]) -> Callable:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        stop.begin(operation, path_of(arguments))
        result = function(*arguments, **named)
        stop.here(f"after the {operation}", last=True)
        return result

    return wrapped


def _passed(function: Callable, name: str, stop: Stop) -> Callable:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        stop.here(f"before {name}")
        result = function(*arguments, **named)
        stop.here(f"after {name}")
        return result

    return wrapped
