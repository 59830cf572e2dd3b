"""A run of the ledger as Ray Tune sees it: the actor that works through it and what it reports. Imported where Ray Tune
is wanted only."""

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

from stability.runs.directory import RUNNING, tail
from stability.runs.processes import Process
from stability.startup import uncollected
from sweeps.gpu_memory import release
from sweeps.launchers.ray.shared_folder import ARRIVAL_S, BLIND
from sweeps.trial import RunTrial, Trial

REPORT_S = 1.0  # between two results of a run, but for those of its validations
LOOK_S = 0.2  # between two looks at whether the sweep is to stop
LAST_BREATH_S = 10.0  # a worker reported dead may still write, until it finds out that it is alone
STOP = "stop"
COLUMNS = ("step", "loss", "lr", "val_nll")  # of Tune's tables, beside the state: a CSV's are those of its first row
LEFT = "left to another sweep"  # in place of a run's state
RUN = "run"  # the key of a trial's configuration that holds the run's id
ACCOUNT = "traceback"  # the key of a result that tells of an error which the run's own folder could not be told


@dataclass(frozen=True)
class Job:
    """The work of one launch, as its workers are told it. ``folder``: of this launch's Tuner, in the pool of runs; a
    file `STOP` in it asks them to save and end. ``driver``: the process that waits for what they do; ``milestones``:
    steps that a scheduler decides at."""

    trials: Mapping[str, Trial]
    run: RunTrial
    folder: str
    driver: Process
    milestones: frozenset[int] = frozenset()

    @property
    def stop_file(self) -> Path:
        return Path(self.folder) / STOP


class RunTrainable(tune.Trainable):
    """The actor that works through runs. Nothing is saved or restored by Tune: a run that is begun anew, here or on
    another node, finds its own last checkpoint. From run to run it keeps the imported modules only."""

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
        """Take another run, in the same process."""
        self._next = new_config[RUN]["id"]
        return True

    def step(self) -> dict[str, Any]:
        """Work on the run until there is something to tell. Only the death of a worker is for Tune to try again: an
        error that could not be written down (a full disk) ends the run and is told as its result."""
        try:
            if self._next:
                self._close()
                self._begin(self._next)
            return self._work()
        except Exception:  # noqa: BLE001 whatever it is, the driver is told
            account, self._steps = traceback.format_exc(), None
            return {"state": "failed", ACCOUNT: account, "done": True}

    def _work(self) -> dict[str, Any]:
        """Return what there is to tell next: of a step that the scheduler waits for, of a second gone by, of the run's
        end. Asked to stop, or with the driver gone, it saves first."""
        assert self._steps is not None
        told_at = looked_at = time.monotonic()
        if self._job.stop_file.exists():
            return self._ended()
        for _ in self._steps:
            now = time.monotonic()
            if now - looked_at > LOOK_S:
                looked_at = now
                if self._job.driver.lives is False:
                    self._close()
                    os._exit(1)  # nobody reads what it would return
                if self._job.stop_file.exists():
                    return self._ended()
            self._count += 1
            if now - told_at > REPORT_S or self._stands_at_a_milestone():
                self._read()
                return {**self._told, "done": False}
        return self._ended()

    def cleanup(self) -> None:
        self._close()

    def _begin(self, run_id: str) -> None:
        """Begin a run, once the worker that had it before and died has let go of it."""
        trial, self._next = self._job.trials[run_id], ""
        self._trial = trial
        deadline = time.monotonic() + LAST_BREATH_S
        while (owner := trial.lock.owner()) and owner.launch == trial.launch and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._steps: Generator[None, None, None] | None = self._job.run(trial)
        self._told: dict[str, Any] = {**dict.fromkeys(COLUMNS), "state": "running"}
        self._begun_at = self._count = 0

    def _stands_at_a_milestone(self) -> bool:
        """Return whether the step that was taken is one that the scheduler decides at."""
        if not self._job.milestones:
            return False
        if self._count == 1:
            self._read()
            self._begun_at = (self._told["step"] or 1) - 1
        step = self._begun_at + self._count
        if step not in self._job.milestones:
            return False
        self._read()
        self._begun_at += (self._told["step"] or step) - step  # a guard may have gone back to an earlier step
        return self._told["step"] == step

    def _close(self) -> None:
        """Close the run, which saves it where it has not ended."""
        steps, self._steps = self._steps, None
        if steps is not None:
            try:
                steps.close()
            finally:
                release()

    def _ended(self) -> dict[str, Any]:
        """Close the run, whose status is then on disk, and return its last result, which says what that says: a run
        that diverged stands at its last good step and has no NLL, whatever its log ends with. One that another sweep
        works on has not ended: it is left to that sweep."""
        self._close()
        self._read()
        status = self._trial.directory.status()
        if status["state"] in ("queued", RUNNING) and self._trial.held_by_another():
            return {**self._told, "state": LEFT, "done": True}
        nll = {"val_nll": status["result"]["val_nll"]} if "result" in status else {}
        return {**self._told, "state": status["state"], "step": status["step"], **nll, "done": True}

    def _read(self) -> None:
        """Take in the end of the run's log: the last row, and the last validation."""
        rows = tail(self._trial.directory.metrics_file)
        validated = [row["val_nll"] for row in rows if row.get("val_nll") is not None]
        self._told |= {key: rows[-1][key] for key in COLUMNS[:-1] if rows and rows[-1].get(key) is not None}
        self._told |= {"val_nll": validated[-1]} if validated else {}
