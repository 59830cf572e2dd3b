"""Run one trial as every launcher does: lock its run, train, then measure α_max, then sample; what goes wrong becomes a
status, never an exception."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.config.base import AXES, checked
from stability.config.curvature import CurvatureSpec
from stability.config.generation import GenerationSpec
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.registry import add_plugins
from stability.runs.directory import INTERRUPTED, RUNNING, STOPPED, RunDirectory, step_of
from stability.runs.leftovers import leftovers, remove
from stability.runs.lock import LostLock, Owner, RunLock
from stability.runs.provenance import command_line
from stability.runs.sinks import Sinks
from sweeps.trial_names import choice_name, several_of

IsMeasured = Callable[[RunDirectory, CurvatureSpec], bool]
Points = Sequence[tuple[str, RunSpec]]  # runs with their variants' labels, as `SweepSpec.points` gives them
DEATH_S = 10.0  # a worker is reported dead before the system has cleared it away


@dataclass(frozen=True)
class Trial:
    """All that a worker needs, picklable, with absolute paths.

    ``spec``: the RunSpec as plain JSON; ``curvature``: the CurvatureSpec as plain JSON, or None; ``sinks``: what
      its sinks are asked for (`stability.runs.sinks.Sinks`), or None;
    ``command``: the command line that asked for it, for the run's provenance; ``variant``: what an ablation changes in
      it, e.g. "window=4";
    ``generate``: the GenerationSpec as plain JSON, or None; ``launch``: tells one launch of a sweep from all others, ""
      where nobody asked for one;
    ``devices``: how many share a run's microbatches or, with ``shard``, its parameters; ``stop_at``: a step before the
      last at which the run is left, to be gone on with or not; ``several``: the axes beside the mechanism of which the
      sweep has more than one choice; ``stopped_by``: the search that may stop the run for good, "" for none;
    ``failed_at``: when the run had failed before this launch, which tries it once more; None: it had not.
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
        """Whether anything is asked for after the training: α_max, samples."""
        return self.curvature is not None or self.generate is not None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.pool, self.run_id)

    @property
    def cache_dir(self) -> Path:
        """The pool's folder of prepared data."""
        return Path(self.pool) / "cache"

    @property
    def label(self) -> str:
        """``"sa hc window=4 lr=0.001 seed=0"``: of residual, optimizer and norm those that tell it from other runs of
        its sweep."""
        choices = [choice_name(self.spec[axis]) for axis in ("mechanism", *self.several)]
        return " ".join(
            filter(None, (*choices, self.variant, f"lr={self.spec['lr_peak']:g}", f"seed={self.spec['seed']}"))
        )

    @property
    def lock(self) -> RunLock:
        """The run's lock, not acquired yet."""
        return RunLock(self.directory.path, self.launch)

    def held_by_another(self) -> Owner | None:
        """Return who works on the run, where that is neither a worker of this launch nor nobody."""
        owner = self.lock.owner()
        return None if owner is None or (self.launch and owner.launch == self.launch) else owner

    def has_failed(self) -> bool:
        """Return whether the run has failed since this launch chose it, whoever tried it."""
        return self.last_failure() not in (None, self.failed_at)

    def last_failure(self) -> float | None:
        """Return when the run failed, where that is how it stands."""
        status = self.directory.status()
        return status.get("changed_at", 0.0) if status["state"] == "failed" else None


RunTrial = Callable[[Trial], Generator[None, None, None]]  # `run_trial`, or what replaces it in tests


def trials_of(spec: SweepSpec, points: Points) -> list[Trial]:
    """Return the trials of a sweep's runs, in the pool ``spec.runs_dir``, with what the sweep asks for after the
    training."""
    shared: dict[str, Any] = {
        "pool": str(Path(spec.runs_dir).resolve()),
        "curvature": spec.curvature.model_dump(mode="json") if spec.hessian else None,
        "generate": None if spec.generate is None else spec.generate.absolute().model_dump(mode="json"),
        "device": spec.device,
        "sinks": None,
        "command": command_line(),
        "several": several_of({axis: getattr(spec, axis) for axis in AXES}),
    }
    return [Trial(run_id(run), run.model_dump(mode="json"), variant=variant, **shared) for variant, run in points]


def is_done(trial: Trial, is_measured: IsMeasured | None = None) -> bool:
    """Return whether a trial has its verdict and all measurements. A run with a damaged file is not done: whoever works
    on it names the file. ``is_measured`` replaces the probe's own in tests."""
    # at its last step a run has a verdict to come, which an interrupt may have kept it from
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
    return is_measured(trial.directory, checked(CurvatureSpec, trial.curvature))


def _is_generated(trial: Trial) -> bool:
    if trial.generate is None:
        return True
    from stability.probes.generation.generating import is_generated

    return is_generated(trial.directory, checked(GenerationSpec, trial.generate))


def is_stopped(trial: Trial) -> bool:
    """Return whether the trial's own search has stopped its run for good."""
    status = trial.directory.status()
    return status["state"] == STOPPED and status.get("by") == trial.stopped_by


def mark_stopped(trial: Trial, reason: str) -> bool:
    """Set the run of a trial that was stopped by its search ``stopped``; whether that is done: not yet where somebody
    works on the run. A run that has ended meanwhile stays as it is; one whose worker was killed while it saved
    stands at its last checkpoint."""
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
    """Train, measure and sample a trial under its run's lock; yields after every step, where a launcher can stop it.

    A run that another process works on is left to it, without a step; one that another sweep has failed since this
    one handed it out is left as it is. Closing the generator leaves a run that resumes where it stopped. A crash is
    written to ``status.json`` as ``failed`` with its traceback's file and ends the generator quietly, so that the other
    trials go on. ``work`` replaces all steps in tests.
    """
    lock = trial.lock
    if not lock.acquire():
        return
    try:
        if trial.launch and trial.has_failed():
            return
        _clear(trial.directory)
        with closing(Sinks(trial.directory, trial.sinks)) as sinks:  # what is measured goes there, too
            for steps in _parts(trial, sinks) if work is None else [work(trial)]:
                yield from lock.during(steps)
    except LostLock:  # this machine stood still for minutes: whoever has the run now goes on from its last checkpoint
        return
    # the boundary of a trial: whatever crashed, the sweep goes on and the traceback is kept
    except Exception as error:  # noqa: BLE001
        trial.directory.fail(f"{type(error).__name__}: {error}", traceback.format_exc(), trial.spec["steps"])
    finally:
        lock.release()


def tidy(trial: Trial) -> None:
    """Remove what a process killed at a bad moment left in a run that nobody works on, so that it does not lie there
    for good."""
    lock = trial.lock
    if (lock.has_stale_claims() or leftovers(trial.directory.path)) and lock.acquire():
        try:
            _clear(trial.directory)
        finally:
            lock.release()


def _clear(directory: RunDirectory) -> None:
    for path in leftovers(directory.path):
        remove(path)


def set_failed(trial: Trial, reason: str) -> None:
    """Set a trial ``failed`` if its folder holds another run's files, unless somebody works on it."""
    lock = trial.lock
    if lock.acquire():
        try:
            trial.directory.fail(reason, f"{reason}\n", trial.spec["steps"])
        finally:
            lock.release()


def mark_failed(trial: Trial, reason: str, account: str) -> None:
    """Set the trial of a worker that died ``failed``, with ``account`` in its traceback's file. A trial that was done
    by then stays done; a run that another sweep has taken over meanwhile is left to it."""
    lock, deadline = trial.lock, time.monotonic() + DEATH_S
    while not lock.acquire():
        if trial.held_by_another() or time.monotonic() > deadline:
            return
        time.sleep(0.1)
    try:
        if not is_done(trial):
            trial.directory.fail(reason, account, trial.spec["steps"])
    finally:
        lock.release()


def _parts(trial: Trial, sinks: Sinks) -> Iterator[Iterator[None]]:
    """Yield the steps of the training, of what measures α_max and of what draws samples; each part ends before the next
    is asked for."""
    from stability.config.parse import parse_run
    from stability.training.run import train

    add_plugins(trial.spec.get("plugins"))  # a worker has them from the command that made the trial
    where = {"cache_dir": trial.cache_dir, "device": trial.device}
    how = {"devices": trial.devices, "shard": trial.shard, "stop_at": trial.stop_at}
    yield train(parse_run(trial.spec), trial.directory, sinks=sinks, command=trial.command, **where, **how)
    if not trial.directory.finished:  # stopped at a rung
        return
    if trial.curvature is not None:
        yield _measure(trial, checked(CurvatureSpec, trial.curvature), sinks)
    if trial.generate is not None:
        from stability.probes.generation.generating import generate

        yield generate(trial.directory, checked(GenerationSpec, trial.generate), **where)


def _measure(trial: Trial, curvature: CurvatureSpec, sinks: Sinks) -> Iterator[None]:
    """Measure the α_max that is missing, and send its medians to the sinks."""
    from stability.probes.curvature.alpha_max import is_measured, measure
    from stability.probes.curvature.medians import medians

    if is_measured(trial.directory, curvature):
        return
    yield from measure(trial.directory, curvature, cache_dir=trial.cache_dir, device=trial.device)
    if trial.sinks is None:
        return
    sinks.open(None)
    for row in medians(trial.directory, curvature):
        sinks.measured(row)
