"""Say what the runs of a study have logged and measured: the series that panels can show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.medians import medians
from stability.runs.directory import RunDirectory
from stability.runs.rows import logged


@dataclass(frozen=True)
class Series:
    """Names of series, each in the order in which runs log them.

    ``steps``: against the step, of a run's metrics; ``blocks``: the same of each block, ``grad_norm/blocks.0.mixer``;
    ``checkpoints``: against the checkpoint's step, ``alpha_max/terminal/checkpoint``.
    """

    steps: tuple[str, ...]
    blocks: tuple[str, ...]
    checkpoints: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[RunDirectory], curvature: CurvatureSpec | None) -> Series:
        """Return what at least one of the runs has. ``curvature``: how the study measures α_max; None: it does not."""
        steps = dict.fromkeys(name for run in runs for row in logged(run) for name in row if name != "step")
        measured = dict.fromkeys(name for run in runs for row in measured_rows(run, curvature) for name in row)
        return cls(
            tuple(name for name in steps if "/blocks." not in name),
            tuple(name for name in steps if "/blocks." in name),
            tuple(name for name in measured if name != "step"),
        )


def measured_rows(run: RunDirectory, curvature: CurvatureSpec | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured checkpoint of a run, as `medians` does; nothing of a run without a verdict."""
    if curvature is not None and run.finished:
        yield from medians(run, curvature)
