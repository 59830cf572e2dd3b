"""Logged and measured series of a study's runs, for panels, and upload of finished runs to W&B from their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.medians import medians
from stability.runs.directory import RunDirectory
from stability.runs.log import summary_of
from stability.runs.sink import BEGUN_ANEW, Told, failure_file, read_logged_rows
from stability.runs.wandb_sink import WandbSink


@dataclass(frozen=True)
class Series:
    """Names of series, in the order in which runs log them.

    Attributes:
        steps: metrics over the step.
        blocks: the same per block, e.g. ``grad_norm/blocks.0.mixer``.
        checkpoints: measurements over the checkpoint's step, e.g. ``alpha_max/terminal/checkpoint``.
    """

    steps: tuple[str, ...]
    blocks: tuple[str, ...]
    checkpoints: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[RunDirectory], curvature: CurvatureSpec | None) -> Series:
        """Return the series of at least one run.

        Args:
            runs: the runs.
            curvature: settings of the study's α_max measurement; None: not measured.
        """
        steps = dict.fromkeys(name for run in runs for row in read_logged_rows(run) for name in row if name != "step")
        measured = dict.fromkeys(name for run in runs for row in measured_rows(run, curvature) for name in row)
        return cls(
            tuple(name for name in steps if "/blocks." not in name),
            tuple(name for name in steps if "/blocks." in name),
            tuple(name for name in measured if name != "step"),
        )


def measured_rows(run: RunDirectory, curvature: CurvatureSpec | None) -> Iterator[dict[str, Any]]:
    """Yield one row per measured checkpoint (`medians`); none without a verdict."""
    if curvature is not None and run.finished:
        yield from medians(run, curvature)


def is_missing(told: Told) -> bool:
    """Return whether W&B lacks a run, trained without it, or stopped receiving it before its end."""
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
