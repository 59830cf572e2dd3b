"""Run one trial under its run's lock: train, measure α_max, draw samples; name trials by their varying choices.

Every launcher uses it. A failure becomes a status, never an exception.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from stability.config.base import AXES, validate
from stability.config.curvature import CurvatureSpec
from stability.config.generation import GenerationSpec
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.registry import add_plugins
from stability.runs.directory import INTERRUPTED, RUNNING, STOPPED, RunDirectory, step_of
from stability.runs.leftovers import find_leftovers, remove
from stability.runs.lock import LostLock, Owner, RunLock
from stability.runs.log import Sinks
from stability.runs.provenance import command_line

IsMeasured = Callable[[RunDirectory, CurvatureSpec], bool]
Points = Sequence[tuple[str, RunSpec]]  # (variant label, run), as in `SweepSpec.points`
DEATH_S = 10.0  # a worker may be reported dead before its process has ended


@dataclass(frozen=True)
class Trial:
    """A worker's complete input, picklable, with absolute paths.

    Attributes:
        run_id: the run's id.
        spec: the RunSpec as plain JSON.
        pool: the folder of all runs.
        curvature: the CurvatureSpec as plain JSON, or None.
        device: the device's name.
        sinks: settings of the sinks (`stability.runs.sink.Sinks`), or None.
        command: the command line, for the run's provenance.
        variant: an ablation's change, e.g. "window=4".
        generate: the GenerationSpec as plain JSON, or None.
        launch: a unique id of the sweep's launch, or "" without one.
        devices: number of devices that share a run's microbatches, or its parameters with ``shard``.
        shard: whether the devices share the parameters.
        stop_at: a step before the last at which the run stops; it may continue later.
        several: axes, beside the mechanism, with more than one choice in the sweep.
        stopped_by: the search that may stop the run for good, or "".
        failed_at: time of the run's failure before this launch, which retries it, or None.
    """

    run_id: str
    spec: dict[str, Any]
    pool: str
    curvature: dict[str, Any] | None
    device: str
    sinks: dict[str, Any] | None
    command: str = ""
    variant: str = ""
    generate: dict[str, Any] | None = None
    launch: str = ""
    devices: int = 1
    shard: bool = False
    stop_at: int | None = None
    several: tuple[str, ...] = ()
    stopped_by: str = ""
    failed_at: float | None = None

    @property
    def measures(self) -> bool:
        """Whether α_max or samples are requested after the training."""
        return self.curvature is not None or self.generate is not None

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.pool, self.run_id)

    @property
    def cache_dir(self) -> Path:
        """The pool's folder of prepared data."""
        return Path(self.pool) / "cache"

    @property
    def label(self) -> str:
        """The trial's label: ``"sa hc window=4 lr=0.001 seed=0"``.

        It names residual, optimizer and norm only if the sweep varies them.
        """
        choices = [choice_name(self.spec[axis]) for axis in ("mechanism", *self.several)]
        return " ".join(
            filter(None, (*choices, self.variant, f"lr={self.spec['lr_peak']:g}", f"seed={self.spec['seed']}"))
        )

    @property
    def lock(self) -> RunLock:
        """The run's lock, not acquired yet."""
        return RunLock(self.directory.path, self.launch)

    def find_other_owner(self) -> Owner | None:
        """Return the lock's owner if it belongs to another launch, else None."""
        owner = self.lock.owner()
        return None if owner is None or (self.launch and owner.launch == self.launch) else owner

    def has_failed(self) -> bool:
        """Return whether the run has failed since this launch chose it, in any sweep."""
        return self.last_failure() not in (None, self.failed_at)

    def last_failure(self) -> float | None:
        """Return the time of the run's failure if its status is failed, else None."""
        status = self.directory.status()
        return status.get("changed_at", 0.0) if status["state"] == "failed" else None


RunTrial = Callable[[Trial], Generator[None, None, None]]  # `run_trial`, or its replacement in tests


def make_trials(spec: SweepSpec, points: Points) -> list[Trial]:
    """Return a sweep's trials in the pool ``spec.runs_dir``, with the requested measurements."""
    shared: dict[str, Any] = {
        "pool": str(Path(spec.runs_dir).resolve()),
        "curvature": spec.curvature.model_dump(mode="json") if spec.hessian else None,
        "generate": None if spec.generate is None else spec.generate.resolve_oracle().model_dump(mode="json"),
        "device": spec.device,
        "sinks": None,
        "command": command_line(),
        "several": list_varied_axes({axis: getattr(spec, axis) for axis in AXES}),
    }
    return [Trial(run_id(run), run.model_dump(mode="json"), variant=variant, **shared) for variant, run in points]


def is_done(trial: Trial, is_measured: IsMeasured | None = None) -> bool:
    """Return whether a trial has its verdict and all measurements.

    A run with a damaged file is not done: working on it then reports the file. ``is_measured`` replaces the probe's own
    check in tests.
    """
    # not at the last step: an interrupt may have prevented the run's verdict there
    if trial.stop_at is not None and trial.directory.status()["step"] >= trial.stop_at < trial.spec["steps"]:
        return True
    if trial.stopped_by and is_stopped(trial):
        return True
    if not trial.directory.finished:
        return False
    try:
        return _is_measured(trial, is_measured) and _is_generated(trial)
    except ValueError:
        return False


def _is_measured(trial: Trial, is_measured: IsMeasured | None) -> bool:
    if trial.curvature is None:
        return True
    if is_measured is None:
        from stability.probes.curvature.alpha_max import is_measured
    return is_measured(trial.directory, validate(CurvatureSpec, trial.curvature))


def _is_generated(trial: Trial) -> bool:
    if trial.generate is None:
        return True
    from stability.probes.generation.generating import is_generated

    return is_generated(trial.directory, validate(GenerationSpec, trial.generate))


def is_stopped(trial: Trial) -> bool:
    """Return whether the trial's own search has stopped its run for good."""
    status = trial.directory.status()
    return status["state"] == STOPPED and status.get("by") == trial.stopped_by


def mark_stopped(trial: Trial, reason: str) -> bool:
    """Set a run ``stopped`` after its search stopped it; return False while a process works on it.

    An ended run keeps its status. The step is the last checkpoint's if the worker was killed while saving.
    """
    lock = trial.lock
    if not lock.acquire():
        return False
    try:
        status = trial.directory.status()
        if status["state"] in (INTERRUPTED, RUNNING):
            how = {"num_steps": trial.spec["steps"], "by": trial.stopped_by}
            step = max(status["step"], *map(step_of, trial.directory.checkpoints()), 0)
            trial.directory.set_status(STOPPED, step=step, reason=reason, **how)
    finally:
        lock.release()
    return True


def run_trial(trial: Trial, work: Callable[[Trial], Iterator[None]] | None = None) -> Generator[None, None, None]:
    """Train, measure and sample a trial under its run's lock, step by step.

    It yields after every step. A launcher can stop it there: closing the generator leaves a resumable run. The
    generator yields no step if another process holds the run, or if another sweep has failed it since this launch chose
    it. A crash sets the status to ``failed`` with a traceback file and ends the generator without an exception, so the
    other trials continue. ``work`` replaces all steps in tests.
    """
    lock = trial.lock
    if not lock.acquire():
        return
    try:
        if trial.launch and trial.has_failed():
            return
        _clear(trial.directory)
        with closing(Sinks(trial.directory, trial.sinks)) as sinks:  # measurements also go to the sinks
            for steps in _run_parts(trial, sinks) if work is None else [work(trial)]:
                yield from lock.run_steps(steps)
    except LostLock:  # this machine paused for minutes: another process has the run and continues at its checkpoint
        return
    # the boundary of a trial: after any crash the sweep continues, with the traceback on file
    except Exception as error:  # noqa: BLE001
        trial.directory.fail(f"{type(error).__name__}: {error}", traceback.format_exc(), trial.spec["steps"])
    finally:
        lock.release()


def tidy(trial: Trial) -> None:
    """Remove a killed process's files from a run, unless the run is in use."""
    lock = trial.lock
    if (lock.has_stale_claims() or find_leftovers(trial.directory.path)) and lock.acquire():
        try:
            _clear(trial.directory)
        finally:
            lock.release()


def _clear(directory: RunDirectory) -> None:
    for path in find_leftovers(directory.path):
        remove(path)


def set_failed(trial: Trial, reason: str) -> None:
    """Set a trial ``failed`` because its folder contains another run's files.

    It stays unchanged while in use.
    """
    lock = trial.lock
    if lock.acquire():
        try:
            trial.directory.fail(reason, f"{reason}\n", trial.spec["steps"])
        finally:
            lock.release()


def mark_failed(trial: Trial, reason: str, account: str) -> None:
    """Set a trial ``failed`` after the death of its worker.

    A completed trial stays done. A run acquired by another sweep meanwhile stays unchanged.

    Args:
        trial: the trial.
        reason: one line for the status.
        account: the text of the traceback file.
    """
    lock, deadline = trial.lock, time.monotonic() + DEATH_S
    while not lock.acquire():
        if trial.find_other_owner() or time.monotonic() > deadline:
            return
        time.sleep(0.1)
    try:
        if not is_done(trial):
            trial.directory.fail(reason, account, trial.spec["steps"])
    finally:
        lock.release()


def _run_parts(trial: Trial, sinks: Sinks) -> Iterator[Iterator[None]]:
    """Yield the steps of training, α_max and sampling; each part ends before the next begins."""
    from stability.config.parse import parse_run
    from stability.training.run import train

    add_plugins(trial.spec.get("plugins"))  # a worker receives them from the command that created the trial
    where = {"cache_dir": trial.cache_dir, "device": trial.device}
    how = {"devices": trial.devices, "shard": trial.shard, "stop_at": trial.stop_at}
    yield train(parse_run(trial.spec), trial.directory, sinks=sinks, command=trial.command, **where, **how)
    if not trial.directory.finished:  # stopped at a rung
        return
    if trial.curvature is not None:
        yield _measure(trial, validate(CurvatureSpec, trial.curvature), sinks)
    if trial.generate is not None:
        from stability.probes.generation.generating import generate

        yield generate(trial.directory, validate(GenerationSpec, trial.generate), **where)


def _measure(trial: Trial, curvature: CurvatureSpec, sinks: Sinks) -> Iterator[None]:
    """Measure a missing α_max, and send its medians to the sinks."""
    from stability.probes.curvature.alpha_max import is_measured, measure
    from stability.probes.curvature.medians import medians

    if is_measured(trial.directory, curvature):
        return
    yield from measure(trial.directory, curvature, cache_dir=trial.cache_dir, device=trial.device)
    if trial.sinks is None:
        return
    sinks.open(None)
    for row in medians(trial.directory, curvature):
        sinks.write_measured(row)


STANDARD = {"name": "standard"}  # of an axis that runs of before lack


class Named(Protocol):
    """The attributes of a trial relevant for its name."""

    @property
    def spec(self) -> dict[str, Any]: ...

    @property
    def variant(self) -> str: ...


def choice_name(choice: Any) -> str:
    """Return a part's name from ``spec.json``."""
    return choice["name"]


def list_varied_axes(choices: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Return the axes with several choices in a sweep, without the mechanism."""
    return tuple(axis for axis in list(AXES)[1:] if len(choices.get(axis, ())) > 1)


def variants(trials: Sequence[Named]) -> list[str]:
    """Return each trial's name without learning rate and seed.

    It contains the mechanism, the choices on varying axes, and an ablation's setting.
    """
    names = [[choice_name(trial.spec.get(axis, STANDARD)) for axis in AXES] for trial in trials]
    varied = [index for index in range(1, len(AXES)) if len({row[index] for row in names}) > 1]
    chosen = [
        [row[0], *(row[index] for index in varied), trial.variant] for row, trial in zip(names, trials, strict=True)
    ]
    return [" ".join(filter(None, words)) for words in chosen]
