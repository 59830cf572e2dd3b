"""Stand-ins for `run_trial`: they write the files that the real one writes, without torch. Importable by name, so that
Ray's workers find them."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from stability.runs.directory import RunDirectory
from stability.runs.processes import Process
from sweeps.launchers import list_driver_variables, set_environment
from sweeps.trial import Trial, run_trial


def make_trial(
    pool: Path, index: int = 0, *, steps: int = 4, curvature: dict[str, Any] | None = None, **more: Any
) -> Trial:
    parts = {
        "mechanism": {"name": "sa"},
        "residual": {"name": "identity"},
        "optimizer": {"name": "adamw"},
        "norm": {"name": "layernorm"},
    }
    spec = {**parts, "lr_peak": 0.01, "seed": index, "steps": steps, "threads": 1, **more}
    return Trial(run_id=f"{index:012x}", spec=spec, pool=str(pool), curvature=curvature, device="cpu", sinks=None)


def imported(name: str) -> Any:
    """A module that imports Ray, which reads its environment only then: set as the launcher sets it."""
    with set_environment(list_driver_variables()):
        return importlib.import_module(name)


def worker(trial: Trial, run: Any, folder: Path, driver: Process) -> Any:
    """The actor of `launcher=ray` without Ray, about to work on a trial."""
    trainable = imported("sweeps.launchers.ray.trainable")
    made = object.__new__(trainable.RunTrainable)
    made.setup({"run": {"id": trial.run_id}}, trainable.Job({trial.run_id: trial}, run, str(folder), driver))
    return made


def run_fake(trial: Trial, *, step_s: float = 0.0, verdict: str = "stable") -> Iterator[None]:
    """``spec["steps"]`` steps with the rows and states of a real run; closing it leaves ``saved.json`` with the step it
    stood at."""
    directory, steps = trial.directory, trial.spec["steps"]
    saved = directory.path / "saved.json"
    directory.path.mkdir(parents=True, exist_ok=True)
    (directory.path / "worker.json").write_text(
        json.dumps({"pid": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS"), "cwd": str(Path.cwd())})
    )
    step = json.loads(saved.read_text()) if saved.exists() else 0
    directory.set_status("running", step=step, num_steps=steps, phase="training")
    started = time.perf_counter()
    try:
        while step < steps:
            time.sleep(step_s)
            step += 1
            log_step(directory, step, wall_s=time.perf_counter() - started)
            yield
    except GeneratorExit:
        saved.write_text(json.dumps(step))
        directory.set_status("interrupted", step=step, num_steps=steps)
        raise
    finish(directory, verdict, step=step, val_nll=2.5)


def log_step(directory: RunDirectory, step: int, *, wall_s: float, val_nll: float | None = None) -> None:
    directory.path.mkdir(parents=True, exist_ok=True)
    with open(directory.metrics_file, "a") as file:
        file.write(
            json.dumps(
                {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "update_norm": 0.1, "lr": 0.01, "val_nll": val_nll}
            )
            + "\n"
        )
    with open(directory.timing_file, "a") as file:
        file.write(json.dumps({"step": step, "wall_s": wall_s, "tokens_per_s": 512.0}) + "\n")


def finish(directory: RunDirectory, verdict: str, *, step: int, val_nll: float) -> None:
    directory.set_status(verdict, step=step, num_steps=step, result={"val_nll": val_nll, "wall_s": 1.0})


def run_slowly(trial: Trial) -> Iterator[None]:
    yield from run_fake(trial, step_s=0.1)


def run_and_fail(trial: Trial) -> Iterator[None]:
    """Seed 1 crashes as the real `run_trial` reports it; the others run."""
    steps = run_fake(trial)
    for count, _ in enumerate(steps):
        yield
        if trial.spec["seed"] == 1 and count == 1:
            steps.close()  # type: ignore[attr-defined]
            trial.directory.traceback_file.write_text("Traceback: ValueError: planted\n")
            trial.directory.set_status("failed", step=2, reason="ValueError: planted")
            return


def run_and_die(trial: Trial) -> Iterator[None]:
    """The worker of seed 1 is killed as the kernel kills for memory; the others run."""
    for count, _ in enumerate(run_fake(trial, step_s=0.02)):
        if trial.spec["seed"] == 1 and count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield


def run_counted(trial: Trial) -> Iterator[None]:
    """Notes in the run's folder each time that it is begun, and by whom. A finished run is left alone, as the real loop
    does."""
    if trial.directory.finished:
        return
    trial.directory.path.mkdir(parents=True, exist_ok=True)
    with open(trial.directory.path / "begun.txt", "a") as file:
        file.write(f"{os.getpid()}\n")
    yield from run_fake(trial, step_s=0.02)


def run_and_die_once(trial: Trial) -> Iterator[None]:
    """The worker of seed 1 is killed after two steps, which it had saved; begun again it goes on."""
    yield from _die_once(trial, number=signal.SIGKILL)


def _die_once(trial: Trial, *, number: signal.Signals) -> Iterator[None]:
    directory = trial.directory
    directory.path.mkdir(parents=True, exist_ok=True)
    begun, saved = directory.path / "begun.txt", directory.path / "saved.json"
    with open(begun, "a") as file:
        file.write(f"{os.getpid()}\n")
    for count, _ in enumerate(run_fake(trial, step_s=0.02), 1):
        if trial.spec["seed"] == 1 and count == 2 and len(begun.read_text().split()) == 1:
            saved.write_text("2")
            os.kill(os.getpid(), number)
        yield


def run_and_hang_once(trial: Trial) -> Iterator[None]:
    """Under the run's lock, the worker of seed 1 is stopped by a signal as `run_and_die_once` is killed."""
    yield from run_trial(trial, partial(_die_once, number=signal.SIGSTOP))


def run_on_a_full_disk(trial: Trial) -> Iterator[None]:
    """Seed 1 raises after a step, as `run_trial` does where it cannot even write the failure down; the others run."""
    steps = run_counted(trial)
    for count, _ in enumerate(steps):
        yield
        if trial.spec["seed"] == 1 and count == 1:
            raise OSError(errno.ENOSPC, "No space left on device")


class Unknown:
    """A `RunTrial` that no worker can read, as where a node has another version of the code."""

    def __call__(self, trial: Trial) -> Iterator[None]:
        yield

    def __reduce__(self) -> tuple[Any, ...]:
        return _missing, ()


def _missing() -> None:
    raise AttributeError("only another version has it")


def run_valley(trial: Trial, *, step_s: float = 0.05) -> Iterator[None]:
    """Under the run's lock: validates at each step; the NLL is lowest at a rate of 10^-2.5. It goes on where the log
    stands."""
    yield from run_trial(trial, partial(_through_valley, step_s=step_s))


def _through_valley(trial: Trial, *, step_s: float) -> Iterator[None]:
    directory, steps = trial.directory, trial.spec["steps"]
    directory.path.mkdir(parents=True, exist_ok=True)
    step = directory.status()["step"]
    try:
        while step < steps:
            time.sleep(step_s)
            step += 1
            log_step(directory, step, wall_s=0.1, val_nll=valley(trial.spec, step))
            yield
    except GeneratorExit:
        directory.set_status("interrupted", step=step, num_steps=steps)
        raise
    finish(directory, "stable", step=step, val_nll=valley(trial.spec, step))


def valley(spec: dict[str, Any], step: int) -> float:
    return 2.5 + 0.3 * (math.log10(spec["lr_peak"]) + 2.5) ** 2 + 1 / step


def interrupt_once(trials: list[Trial]) -> Callable[[], None]:
    """An ``on_tick`` that sends this process one Ctrl-C as soon as all of ``trials`` have logged a step."""
    sent: list[None] = []

    def tick() -> None:
        if all(trial.directory.metrics_file.exists() for trial in trials) and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    return tick
