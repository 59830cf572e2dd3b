"""All sinks by their names in ``logger=…``; their libraries are imported on first use."""

from __future__ import annotations

from typing import Any

from stability.runs.directory import RunDirectory
from stability.runs.mlflow_sink import MlflowSink
from stability.runs.sink import AbstractSink, Guarded, Told, drop_nulls
from stability.runs.tensorboard_sink import TensorboardSink
from stability.runs.wandb_sink import WandbSink

SINKS: dict[str, type[AbstractSink]] = {"wandb": WandbSink, "tensorboard": TensorboardSink, "mlflow": MlflowSink}


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
        self._open = [Guarded(name, SINKS[name](**settings), run) for name, settings in self._asked["to"].items()]

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
