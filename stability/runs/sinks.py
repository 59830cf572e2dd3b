"""All sinks by their names in ``logger=…``, and those of one run together. No sink's library is imported before it is
used."""

from __future__ import annotations

from typing import Any

from stability.runs.directory import RunDirectory
from stability.runs.mlflow_sink import MlflowSink
from stability.runs.rows import said
from stability.runs.sink import AbstractSink, Guarded, Told
from stability.runs.tensorboard_sink import TensorboardSink
from stability.runs.wandb_sink import WandbSink

SINKS: dict[str, type[AbstractSink]] = {"wandb": WandbSink, "tensorboard": TensorboardSink, "mlflow": MlflowSink}


class Sinks:
    """The sinks of one run, which get every row at the same time.

    ``asked``: what a trial carries, plain and picklable: ``to``, the settings of each sink by its name, and what
    `Told` says beside; None: there are none.
    """

    def __init__(self, directory: RunDirectory, asked: dict[str, Any] | None = None):
        self._directory, self._asked = directory, asked
        self._open: list[Guarded] = []

    def open(self, resume_after: int | None) -> None:
        """Open them all, once (`Told.resume_after`)."""
        if self._open or self._asked is None:
            return
        about = {key: value for key, value in self._asked.items() if key != "to"}
        run = Told(self._directory, resume_after=resume_after, **about)
        self._open = [Guarded(name, SINKS[name](**settings), run) for name, settings in self._asked["to"].items()]

    def write(self, row: dict[str, Any]) -> None:
        for sink in self._open:
            sink.write(said(row))

    def measured(self, row: dict[str, Any]) -> None:
        for sink in self._open:
            sink.measured(said(row))

    def close(self) -> None:
        """Close those that are open, with the run's verdict and result where it has them by now."""
        summary = summary_of(self._directory) if self._open else {}
        for sink in self._open:
            sink.close(summary)
        self._open = []


def summary_of(directory: RunDirectory) -> dict[str, Any]:
    """Return verdict, reason and result of a run, as a sink is closed with; {} where it has no verdict yet."""
    if not directory.finished:
        return {}
    status = directory.status()
    return {"verdict": status["state"], "reason": status["reason"], **status.get("result", {})}
