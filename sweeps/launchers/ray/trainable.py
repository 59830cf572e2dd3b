"""Define the Ray Tune actor for runs; import this module only with Ray Tune."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune

from stability.runs.directory import RUNNING, read_tail
from stability.runs.processes import Process
from stability.startup import uncollected
from sweeps.gpu_memory import release
from sweeps.launchers.ray.shared_folder import ARRIVAL_S, BLIND
from sweeps.trial import RunTrial, Trial

REPORT_S = 1.0  # between two results of a run, apart from milestones
LOOK_S = 0.2  # between two checks for a stop request
LAST_BREATH_S = 10.0  # a worker reported dead may still write until it notices its isolation
STOP = "stop"
COLUMNS = ("step", "loss", "lr", "val_nll")  # of Tune's tables, beside the state; a CSV's first row fixes its columns
LEFT = "left to another sweep"  # in place of a run's state
RUN = "run"  # key of the run's row in a Tune trial's configuration
ACCOUNT = "traceback"  # key of an error that could not be written to the run's folder


@dataclass(frozen=True)
class Job:
    """The work of one launch, as passed to its workers.

    Attributes:
        trials: the trials by run id.
        run: runs one trial.
        folder: the Tuner's folder in the pool of runs; a file `STOP` in it makes workers save and end.
        driver: the process waiting for the workers.
        milestones: the scheduler's decision steps.
    """

    trials: Mapping[str, Trial]
    run: RunTrial
    folder: str
    driver: Process
    milestones: frozenset[int] = frozenset()

    @property
    def stop_file(self) -> Path:
        return Path(self.folder) / STOP


class RunTrainable(tune.Trainable):
    """The actor that trains runs, one after another.

    Tune saves and restores nothing: a restarted run, on any node, finds its own last checkpoint. Only the imported
    modules persist from run to run.
    """

    def setup(self, config: dict[str, Any], job: Job) -> None:
        self._job, self._steps, self._next = job, None, config[RUN]["id"]
        deadline = time.monotonic() + ARRIVAL_S
        while not Path(job.folder).is_dir():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{BLIND}{ray.get_runtime_context().get_node_id()}")
            time.sleep(LOOK_S)
        with uncollected():
            importlib.import_module("stability.training.run")

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Set the next run for this process."""
        self._next = new_config[RUN]["id"]
        return True

    def step(self) -> dict[str, Any]:
        """Work on the run until the next result.

        Tune retries only dead workers. An error that cannot be written (a full disk) ends the run and becomes its
        result.
        """
        try:
            if self._next:
                self._close()
                self._begin(self._next)
            return self._work()
        except Exception:  # noqa: BLE001 the driver must receive every error
            account, self._steps = traceback.format_exc(), None
            return {"state": "failed", ACCOUNT: account, "done": True}

    def _work(self) -> dict[str, Any]:
        """Return the next result: at a milestone, after `REPORT_S`, or at the run's end.

        The run is saved first on a stop request or the driver's death.
        """
        assert self._steps is not None
        told_at = looked_at = time.monotonic()
        if self._job.stop_file.exists():
            return self._finish()
        for _ in self._steps:
            now = time.monotonic()
            if now - looked_at > LOOK_S:
                looked_at = now
                if self._job.driver.lives is False:
                    self._close()
                    os._exit(1)  # without a driver, nothing reads a result
                if self._job.stop_file.exists():
                    return self._finish()
            self._count += 1
            if now - told_at > REPORT_S or self._is_at_milestone():
                self._read()
                return {**self._told, "done": False}
        return self._finish()

    def cleanup(self) -> None:
        self._close()

    def _begin(self, run_id: str) -> None:
        """Start a run, after a dead worker's lock on it is gone."""
        trial, self._next = self._job.trials[run_id], ""
        self._trial = trial
        deadline = time.monotonic() + LAST_BREATH_S
        while (owner := trial.lock.owner()) and owner.launch == trial.launch and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._steps: Generator[None, None, None] | None = self._job.run(trial)
        self._told: dict[str, Any] = {**dict.fromkeys(COLUMNS), "state": "running"}
        self._begun_at = self._count = 0

    def _is_at_milestone(self) -> bool:
        """Return whether the last step is one of the scheduler's decision steps."""
        if not self._job.milestones:
            return False
        if self._count == 1:
            self._read()
            self._begun_at = (self._told["step"] or 1) - 1
        step = self._begun_at + self._count
        if step not in self._job.milestones:
            return False
        self._read()
        self._begun_at += (self._told["step"] or step) - step  # a guard may have returned to an earlier step
        return self._told["step"] == step

    def _close(self) -> None:
        """Close the run, and so save it if it has not ended."""
        steps, self._steps = self._steps, None
        if steps is not None:
            try:
                steps.close()
            finally:
                release()

    def _finish(self) -> dict[str, Any]:
        """Close the run and return its last result from its status.

        A diverged run reports its last good step and no NLL, whatever its log ends with. A run held by another sweep
        has not ended; that sweep continues it.
        """
        self._close()
        self._read()
        status = self._trial.directory.status()
        if status["state"] in ("queued", RUNNING) and self._trial.find_other_owner():
            return {**self._told, "state": LEFT, "done": True}
        nll = {"val_nll": status["result"]["val_nll"]} if "result" in status else {}
        return {**self._told, "state": status["state"], "step": status["step"], **nll, "done": True}

    def _read(self) -> None:
        """Read the last row and the last validation of the run's log."""
        rows = read_tail(self._trial.directory.metrics_file)
        validated = [row["val_nll"] for row in rows if row.get("val_nll") is not None]
        self._told |= {key: rows[-1][key] for key in COLUMNS[:-1] if rows and rows[-1].get(key) is not None}
        self._told |= {"val_nll": validated[-1]} if validated else {}
