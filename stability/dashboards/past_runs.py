"""Send W&B runs from their own files: those that were trained without it, or that it has not all of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.dashboards.series import measured_rows
from stability.runs.rows import logged
from stability.runs.sink import BEGUN_ANEW, Told, failure_file
from stability.runs.sinks import summary_of
from stability.runs.wandb_sink import WandbSink


def is_missing(told: Told) -> bool:
    """Return whether W&B has nothing of a run, or stopped taking it before its end."""
    if not any((told.directory.path / "wandb").glob("*run-*")):
        return True
    failure = failure_file(told.directory, "wandb")
    return failure.exists() and BEGUN_ANEW not in failure.read_text()


def send(told: Told, mode: str, place: Mapping[str, Any], curvature: CurvatureSpec | None) -> Iterator[None]:
    """Send a run as it was logged, with what was measured of it and its verdict; yields once, when it is sent."""
    sink = WandbSink(mode, **place)
    sink.open(told)
    for row in logged(told.directory):
        sink.write(row)
    for row in measured_rows(told.directory, curvature):
        sink.measured(row)
    sink.close(summary_of(told.directory))
    failure_file(told.directory, "wandb").unlink(missing_ok=True)
    yield
