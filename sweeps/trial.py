"""One trial as every launcher runs it: train, then measure α_max, then sample; what goes wrong becomes a status, never an exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.runs.directory import RunDirectory, tail


@dataclass(frozen=True)
class Trial:
    """All that a worker needs, picklable, with absolute paths.

    ``spec``: the RunSpec as plain JSON; ``curvature``: the CurvatureSpec as plain JSON, or None; ``wandb``: arguments of the W&B sink, or None;
    ``command``: the command line that asked for it, for the run's provenance; ``variant``: what an ablation changes in it, e.g. "window=4";
    ``generate``: the GenerationSpec as plain JSON, or None.
    """

    run_id: str
    spec: dict[str, Any]
    pool: str
    curvature: dict[str, Any] | None
    device: str
    wandb: dict[str, Any] | None
    command: str = ""
    variant: str = ""
    generate: dict[str, Any] | None = None

    @property
    def measures(self) -> bool:
        """Whether anything is asked for after the training: α_max, samples."""
        return self.curvature is not None or self.generate is not None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.pool, self.run_id)

    @property
    def label(self) -> str:
        return f"{' '.join(filter(None, (self.spec['mechanism']['name'], self.variant)))} lr={self.spec['lr_peak']:g} seed={self.spec['seed']}"


def run_trial(trial: Trial) -> Iterator[None]:
    """Work through a trial; yields after every step, so that a launcher can stop between steps.

    Closing the generator leaves a run that resumes where it stopped. A crash is written to ``status.json`` as ``failed`` with its traceback's
    file and ends the generator quietly, so that the other trials go on.
    """
    try:
        yield from _train_and_measure(trial)
    except Exception as error:  # noqa: BLE001 the boundary of a trial: whatever crashed, the sweep goes on and the traceback is kept
        mark_failed(trial, f"{type(error).__name__}: {error}", traceback.format_exc())


def mark_failed(trial: Trial, reason: str, account: str) -> None:
    """Set a trial ``failed`` at its last logged step; ``account`` goes into its traceback's file. What training gave before a crash in α_max stays."""
    directory = trial.directory
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.traceback_file.write_text(account)
    rows = tail(directory.metrics_file)
    try:
        result = directory.status().get("result")
    except ValueError:  # the status itself is what is damaged
        result = None
    kept = {"result": result} if result else {}
    directory.set_status("failed", step=rows[-1]["step"] if rows else 0, reason=reason[:500], num_steps=trial.spec["steps"], **kept)


def _train_and_measure(trial: Trial) -> Iterator[None]:
    from stability.config import CurvatureSpec, checked, parse_run
    from stability.probes.alpha_max import measure
    from stability.probes.generation import generate
    from stability.sampling import GenerationSpec
    from stability.training.loop import train

    spec, cache_dir = parse_run(trial.spec), Path(trial.pool) / "cache"
    yield from train(spec, trial.directory, cache_dir=cache_dir, device=trial.device, wandb=trial.wandb, command=trial.command)
    if trial.curvature is not None:
        yield from measure(trial.directory, checked(CurvatureSpec, trial.curvature), cache_dir=cache_dir, device=trial.device)
    if trial.generate is not None:
        yield from generate(trial.directory, checked(GenerationSpec, trial.generate), cache_dir=cache_dir, device=trial.device)
