"""A run of the ledger as Ray Tune sees it: the actor that works through it and what it reports. Imported where Ray Tune
is wanted only."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from stability.runs.directory import tail
from stability.runs.processes import Process
from stability.startup import uncollected
from sweeps.gpu_memory import release
from sweeps.launchers.serial import RunTrial, steps_of
from sweeps.trial import Trial

REPORT_S = 1.0  # between two results of a run, but for those of its validations
LOOK_S = 0.2  # between two looks at whether the sweep is to stop
LAST_BREATH_S = 10.0  # a worker reported dead may still write, until it finds out that it is alone
STOP = "stop"
RUN = "run"  # the key of a trial's configuration that holds the run's id


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
        self._job, self._steps = job, None
        if not Path(job.folder).is_dir():
            raise RuntimeError(f"{os.uname().nodename} does not see {job.folder}; put runs_dir on a shared file system")
        with uncollected():
            importlib.import_module("stability.training.run")
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Close the run and begin the next one, in the same process."""
        self._close()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Work on the run until there is something to tell: a step that the scheduler waits for, a second gone by, its
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

    def _begin(self, config: Mapping[str, Any]) -> None:
        trial = self._trial = self._job.trials[config[RUN]["id"]]
        deadline = time.monotonic() + LAST_BREATH_S
        while (owner := trial.lock.owner()) and owner.launch == trial.launch and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._steps: Generator[None, None, None] | None = steps_of(trial, self._job.run)
        self._told: dict[str, Any] = {}
        self._begun_at = self._count = 0

    def _stands_at_a_milestone(self) -> bool:
        """Return whether the step that was taken is one that the scheduler decides at."""
        if not self._job.milestones:
            return False
        if self._count == 1:
            self._read()
            self._begun_at = self._told.get("step", 1) - 1
        return self._begun_at + self._count in self._job.milestones

    def _close(self) -> None:
        """Close the run, which saves it where it has not ended."""
        steps, self._steps = self._steps, None
        if steps is not None:
            try:
                steps.close()
            finally:
                release()

    def _ended(self) -> dict[str, Any]:
        """Close the run, whose state is then on disk, and return its last result."""
        self._close()
        self._read()
        return {**self._told, "state": self._trial.directory.status()["state"], "done": True}

    def _read(self) -> None:
        """Take in the end of the run's log: the last row, and the last validation."""
        rows = tail(self._trial.directory.metrics_file)
        validated = [row["val_nll"] for row in rows if row.get("val_nll") is not None]
        self._told |= {key: rows[-1][key] for key in ("step", "loss", "lr") if rows and rows[-1].get(key) is not None}
        self._told |= {"val_nll": validated[-1]} if validated else {}
