"""Trials side by side: Ray Tune, one trial a run, actors reused. Ray is imported only when trials are launched."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stability.runs.directory import FINISHED
from sweeps.interrupt import Interrupt
from sweeps.serial_launcher import RunTrial, steps_of
from sweeps.trial import Trial, mark_failed, run_trial

SLICE_S = 2.0  # a worker hands control back this often
GRACE_S = 60.0  # after Ctrl-C the steps under way have this long to end and be saved


def launch(
    trials: Sequence[Trial],
    *,
    on_tick: Callable[[], None],
    interrupt: Interrupt,
    cpus_per_trial: float = 1.0,
    gpus_per_trial: float = 0.0,
    address: str | None = None,
    run: RunTrial = run_trial,
) -> None:
    """Run every trial on this machine's cores (or on the Ray cluster at ``address``), each holding its share of CPUs and GPUs.

    A trial whose worker dies is set ``failed``, with Ray's account of it as traceback; the others go on. Once an interrupt is requested, steps
    under way end, their trials are closed, which saves them, and this returns. Ray that runs already is used and left running.
    Errors: ``RuntimeError`` where Ray is missing or a trial asks for more than there is.
    """
    if not trials:
        return
    with cluster(threads=int(trials[0].spec["threads"]), address=address) as scratch:
        if not interrupt.requested:
            slots = _slots(cpus_per_trial, gpus_per_trial)
            resources = {"cpu": cpus_per_trial, "gpu": gpus_per_trial}
            _tune(trials, run, resources, slots, scratch, on_tick, interrupt)
    if not interrupt.requested:
        for trial in trials:
            if trial.directory.status()["state"] not in (*FINISHED, "failed"):
                mark_failed(trial, "its worker ended without a word", "its worker ended without a word\n")


@contextmanager
def cluster(*, threads: int = 1, address: str | None = None, num_cpus: int | None = None) -> Iterator[Path]:
    """Ray, quiet, in a temporary folder (yielded) that goes with it; one that runs already is used as it is and left running.

    Workers inherit this process's import path, so that a checkout that is not installed works from any folder, and ``threads`` for OpenMP.
    """
    scratch = Path(tempfile.mkdtemp(prefix="stability-ray-", dir=_short_temporary_folder()))
    try:
        with _environment(_settings(threads, scratch)), _quiet():
            ray = _import_ray()
            ours = not ray.is_initialized()
            try:
                if ours:
                    _init(ray, address, num_cpus, scratch)
                yield scratch
            finally:
                if ours:
                    ray.shutdown(wait_for_processes=True)  # else they write to the folder while it is removed
    finally:
        _remove(scratch)


def _import_ray() -> Any:
    try:
        importlib.import_module("ray.tune")
        return importlib.import_module("ray")
    except ImportError as error:
        raise RuntimeError(f"launcher=ray needs Ray ({error}): pip install 'ray[tune]', or choose launcher=serial") from None


def _init(ray: Any, address: str | None, num_cpus: int | None, scratch: Path) -> None:
    shared = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    if address is None:
        ray.init(address="local", num_cpus=num_cpus, object_store_memory=100 * 2**20, _temp_dir=str(scratch), **shared)
    else:  # a cluster's workers don't inherit this process's environment
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        ray.init(address=address, runtime_env={"env_vars": inherited}, **shared)


def _settings(threads: int, scratch: Path) -> dict[str, str]:
    """Environment of this process while Ray runs, which the workers of a local cluster inherit."""
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(Path(entry).resolve()) for entry in sys.path if not entry or Path(entry).is_dir())),
        "OMP_NUM_THREADS": str(threads),
        "RAY_AUTH_MODE": "disabled",  # token mode leaves a file in HOME
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS_SKIP_REGEX": "^",  # read at import: what a raylet says goes nowhere; a dead worker is reported by its trial
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a share of a GPU sees none
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # the run directories are the only ledger
        "TUNE_WARN_THRESHOLD_S": "60",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_TMPDIR": str(scratch),
    }


def _tune(
    trials: Sequence[Trial], run: RunTrial, resources: dict[str, float], slots: int, scratch: Path, on_tick: Callable[[], None], interrupt: Interrupt
) -> None:
    from ray import tune

    stop_file = Path(trials[0].pool) / f".stop-{uuid.uuid4().hex[:12]}"
    watch = _watch(trials, stop_file, on_tick, interrupt)
    tuner = tune.Tuner(
        tune.with_resources(_trainable(trials, run, stop_file), resources),
        param_space={"index": tune.grid_search(list(range(len(trials))))},
        tune_config=tune.TuneConfig(reuse_actors=True),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(scratch),
            verbose=0,
            callbacks=[watch],
            failure_config=tune.FailureConfig(max_failures=0),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    try:
        with _environment({"TUNE_MAX_PENDING_TRIALS_PG": str(slots)}):
            tuner.fit()
    except _Stopped:
        return
    finally:
        stop_file.unlink(missing_ok=True)


class _Stopped(Exception):
    """Ends Tune's loop after Ctrl-C, by way of its own clean-up."""


def _trainable(trials: Sequence[Trial], run: RunTrial, stop_file: Path) -> type:
    """The actor class: a slice of a trial's steps a call. It keeps nothing from one trial to the next but the imported modules."""
    from ray import tune

    class OneTrial(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.steps = steps_of(trials[config["index"]], run)

        def step(self) -> dict[str, Any]:
            deadline = time.monotonic() + SLICE_S
            while not stop_file.exists():
                if next(self.steps, self) is self:
                    return {"done": True}
                if time.monotonic() > deadline:
                    return {"done": False}
            self.cleanup()
            return {"done": True}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.cleanup()
            self.setup(new_config)
            return True

        def cleanup(self) -> None:
            self.steps.close()  # a trial that was under way is saved by this

    return OneTrial


def _watch(trials: Sequence[Trial], stop_file: Path, on_tick: Callable[[], None], interrupt: Interrupt) -> Any:
    """Tune's callback in the driver: ticks, marks trials whose worker died, and ends the loop after Ctrl-C."""
    from ray import tune

    class Watch(tune.Callback):
        waits_for: list[Any] | None = None
        deadline = 0.0

        def __reduce__(self) -> tuple[type, tuple[()]]:
            return object, ()  # Tune writes itself down at the start; nobody reads that, and a live table can't be written

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            _report_death(all_trials[trial.config["index"]], trial)

        def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
            on_tick()
            if interrupt.requested and self.waits_for is None:
                stop_file.touch()
                self.waits_for = [trial for trial in trials if trial.status == "RUNNING"]
                self.deadline = time.monotonic() + GRACE_S
            if self.waits_for is not None and (time.monotonic() > self.deadline or all(trial.status != "RUNNING" for trial in self.waits_for)):
                raise _Stopped

    all_trials = trials
    return Watch()


def _report_death(trial: Trial, tune_trial: Any) -> None:
    text = Path(tune_trial.error_file).read_text() if tune_trial.error_file else "Ray gave no reason\n"
    mark_failed(trial, _reason(text), text)


def _reason(text: str) -> str:
    """Ray's account in one line: what ended the process, or the last line of a traceback."""
    if "Worker exit type" in text or "actor died" in text:
        return "its worker process died: killed, out of memory, or a crash in native code"
    return text.strip().splitlines()[-1]


def _slots(cpus_per_trial: float, gpus_per_trial: float) -> int:
    """How many trials run at a time."""
    import ray

    slots = []
    for name, share in (("CPU", cpus_per_trial), ("GPU", gpus_per_trial)):
        there = ray.cluster_resources().get(name, 0.0)
        if share > there:
            raise RuntimeError(f"{name.lower()}s_per_trial={share:g}, but there are {there:g} {name}s; give at most {there:g}")
        if share:
            slots.append(int(there / share + 1e-6))  # 0.3 / 0.1 is 3
    return min(slots, default=1)


def _remove(folder: Path) -> None:
    """Remove what Ray wrote; its workers, which nobody waits for, may write a moment longer."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
        if not folder.exists():
            return


def _short_temporary_folder() -> str | None:
    """Ray puts sockets below it, whose paths may have 107 characters; None: the system's own choice is short enough."""
    return "/tmp" if len(tempfile.gettempdir()) > 30 and Path("/tmp").is_dir() else None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's and Tune's notes say nothing that the live table and the run directories don't say better."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
