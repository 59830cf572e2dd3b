"""One trial inside a Slurm job: it ends with its verdict, or is saved when the job is to stop, be preempted or run out
of time."""

from __future__ import annotations

import signal
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

from stability.runs.directory import write_json
from sweeps.trial import RunTrial, Trial

ENDED, STOPPED, RAISED = "ended", "stopped", "raised"
LOOK_S = 1.0  # between two looks for the file that asks the jobs to stop


def end_file(folder: Path, job_id: str) -> Path:
    """Return the JSON file of a job's end; submitit's own is a pickle, which runs what it holds."""
    return folder / f"{job_id}_end.json"


class TrialJob:
    """The job that submitit pickles. ``stop_file``: once it exists, the step under way ends, the trial is saved, and
    the job with it."""

    def __init__(self, trial: Trial, run: RunTrial, stop_file: Path):
        self.trial, self.run, self.stop_file = trial, run, stop_file

    def __call__(self) -> None:
        """Work through the trial and write its end beside the stop file, as `read_end` gives it; a job that is queued
        again does not return, and writes none."""
        from submitit import JobEnvironment

        file = end_file(self.stop_file.parent, JobEnvironment().job_id)
        try:
            write_json(file, {"end": self._work_to_an_end(), "account": ""})
        except Exception:
            write_json(file, {"end": RAISED, "account": traceback.format_exc()})
            raise

    def _work_to_an_end(self) -> str:
        """Return `ENDED` where the trial came to its end, `STOPPED` where it was saved before."""
        with _Signals() as signals:
            if self._work(signals):
                return ENDED
        signals.queue_again()
        return STOPPED

    def checkpoint(self) -> Any:
        """Return what a job that is queued again runs: the same, from the trial's own checkpoint. The name is
        submitit's."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, signals: _Signals) -> bool:
        looked_at = float("-inf")
        with closing(self.run(self.trial)) as steps:
            while not signals.received:
                if time.monotonic() - looked_at >= LOOK_S:
                    if self.stop_file.exists():
                        return False
                    looked_at = time.monotonic()
                if next(steps, self) is self:
                    return True
        return False


class _Signals:
    """Handlers that within the ``with`` block only note signals in ``received``: submitit's own would leave in the
    middle of a step."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            self._previous[number] = signal.signal(number, lambda got, frame: self.received.append(got))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def queue_again(self) -> None:
        """Queue the job again if the signal of a preemption or of the time limit came: submitit's handler of it does so
        and ends the process. Others mean stop."""
        for number in self.received:
            if number != signal.SIGTERM and callable(handler := self._previous[number]):
                handler(number, None)
