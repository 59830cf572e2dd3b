"""Run one trial inside a Slurm job.

The job ends with the trial's verdict, or saves the trial on a stop request, preemption or time limit.
"""

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
LOOK_S = 1.0  # between two checks for the stop file


def end_file(folder: Path, job_id: str) -> Path:
    """Return the JSON file of a job's end; submitit's own pickle could run code when loaded."""
    return folder / f"{job_id}_end.json"


class TrialJob:
    """The callable for submitit; once ``stop_file`` exists, it saves its trial and ends.

    submitit pickles it.
    """

    def __init__(self, trial: Trial, run: RunTrial, stop_file: Path):
        self.trial, self.run, self.stop_file = trial, run, stop_file

    def __call__(self) -> None:
        """Run the trial, and write the job's end beside the stop file for `read_end`.

        A requeued job does not return and writes no end.
        """
        from submitit import JobEnvironment

        file = end_file(self.stop_file.parent, JobEnvironment().job_id)
        try:
            write_json(file, {"end": self._work_to_an_end(), "account": ""})
        except Exception:
            write_json(file, {"end": RAISED, "account": traceback.format_exc()})
            raise

    def _work_to_an_end(self) -> str:
        """Return `ENDED` if the trial ended, or `STOPPED` if it was saved before."""
        with _Signals() as signals:
            if self._work(signals):
                return ENDED
        signals.queue_again()
        return STOPPED

    def checkpoint(self) -> Any:
        """Return the requeued job's callable: the same job, resuming the trial's own checkpoint.

        submitit requires the method's name.
        """
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
    """Context manager whose handlers only note signals in ``received``.

    submitit's own handlers would interrupt a step.
    """

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
        """Queue the job again after the signal of a preemption or time limit.

        submitit's handler does so and ends the process. Other signals mean stop.
        """
        for number in self.received:
            if number != signal.SIGTERM and callable(handler := self._previous[number]):
                handler(number, None)
