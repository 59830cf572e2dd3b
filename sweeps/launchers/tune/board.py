"""Callbacks of a Tuner's loop: what it tells the sweep, and when the sweep tells it to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from sweeps.interrupt import Interrupt
from sweeps.launchers.tune.trainable import RUN, Job
from sweeps.trial import Trial

GRACE_S = 60.0  # after Ctrl-C the steps under way have this long to end and be saved


class Board(tune.Callback):
    """The sweep's part in the Tuner's loop, which calls it some ten times a second. ``on_tick`` refreshes the live
    table; ``settle`` marks what the scheduler stopped; ``fail(trial, account)`` sets a run failed that Tune has given
    up."""

    def __init__(
        self,
        job: Job,
        on_tick: Callable[[], None],
        settle: Callable[[], bool],
        interrupt: Interrupt,
        fail: Callable[[Trial, str], None],
    ):
        self._job, self._on_tick, self._settle, self._interrupt, self._fail = job, on_tick, settle, interrupt, fail
        self.num_running = 0
        self.stops_at: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Keep nothing: a Tuner pickles what it is given beside its results, to be restored from there, which nobody
        does."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        self.num_running = sum(trial.status == TuneTrial.RUNNING for trial in trials)
        if self._interrupt.requested and self.stops_at is None:
            self.stops_at = time.monotonic() + GRACE_S
            self._job.stop_file.touch()
        self._settle()
        self._on_tick()

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Set a run failed whose worker died for the last time."""
        account = Path(trial.error_file).read_text() if trial.error_file else "Ray gave no reason\n"
        self._fail(self._job.trials[trial.config[RUN]["id"]], account)


class Stopping(tune.Stopper):
    """The Tuner's rule for its end: once an interrupt is requested, and what ran has been saved, nothing more is
    begun."""

    def __init__(self, board: Board, interrupt: Interrupt):
        self._board, self._interrupt = board, interrupt

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        deadline = self._board.stops_at
        return deadline is not None and (not self._board.num_running or time.monotonic() > deadline)
