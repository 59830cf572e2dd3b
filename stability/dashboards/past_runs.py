"""Upload of finished runs to W&B from their own files.

For runs trained without W&B or incomplete there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.dashboards.series import measured_rows
from stability.runs.rows import read_logged_rows
from stability.runs.sink import BEGUN_ANEW, Told, failure_file
from stability.runs.sinks import summary_of
from stability.runs.wandb_sink import WandbSink


def is_missing(told: Told) -> bool:
    """Return whether W&B lacks a run or stopped receiving it before its end."""
    if not any((told.directory.path / "wandb").glob("*run-*")):
        return True
    failure = failure_file(told.directory, "wandb")
    return failure.exists() and BEGUN_ANEW not in failure.read_text()


def send(told: Told, mode: str, place: Mapping[str, Any], curvature: CurvatureSpec | None) -> Iterator[None]:
    """Send a run's log, measurements and verdict; yield once when sent.

    Args:
        told: the run.
        mode: online or offline.
        place: project and entity.
        curvature: settings of the study's α_max measurement; None: not measured.
    """
    sink = WandbSink(mode, **place)
    sink.open(told)
    for row in read_logged_rows(told.directory):
        sink.write(row)
    for row in measured_rows(told.directory, curvature):
        sink.write_measured(row)
    sink.close(summary_of(told.directory))
    failure_file(told.directory, "wandb").unlink(missing_ok=True)
    yield
