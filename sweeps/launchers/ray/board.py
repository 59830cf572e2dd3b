"""Callbacks of a Tuner's loop: what it tells the sweep, and when the sweep tells it to end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from stability.runs.directory import STOPPED
from stability.runs.processes import Process
from sweeps.interrupt import Interrupt
from sweeps.launchers.ray.cluster import alive, leave_out
from sweeps.launchers.ray.killing import kill
from sweeps.launchers.ray.share import Share
from sweeps.launchers.ray.shared_folder import BLIND, put
from sweeps.launchers.ray.trainable import ACCOUNT, RUN, Job
from sweeps.standing import hangs
from sweeps.trial import mark_failed

GRACE_S = 60.0  # after Ctrl-C the steps under way have this long to end and be saved
LOOK_S = 1.0  # between two looks at which nodes there are
FAILURE = "Failure # "  # before each failure in Tune's file of a trial's errors
NO_NODE_S = 120.0  # a cluster may start a node in place of one that died


class Board(tune.Callback):
    """The sweep's part in the Tuner's loop, which calls it some ten times a second. ``on_tick`` refreshes the live
    table; ``settle`` marks what the scheduler stopped; ``say`` takes a line for the user."""

    def __init__(
        self,
        job: Job,
        share: Share,
        node_retries: int,
        hang_s: float | None = None,
        *,
        on_tick: Callable[[], None],
        settle: Callable[[], bool],
        interrupt: Interrupt,
        say: Callable[[str], None],
    ):
        self._job, self._share, self._node_retries = job, share, node_retries
        self._on_tick, self._settle, self._interrupt, self._say = on_tick, settle, interrupt, say
        self.num_running = 0
        self.stops_at: float | None = None
        self._hang_s, self._watched_at = hang_s, -math.inf
        self._seen: dict[str, tuple[Process, float]] = {}
        self._deaths: Counter[str] = Counter()
        self._error: Exception | None = None
        self._looked_at = self._had_room_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Keep nothing: a Tuner pickles what it is given beside its results, to be restored from there, which nobody
        does."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """End the Tuner with what a callback could not go on after: an error that a callback itself raises, Tune may
        take for its trial's."""
        if self._error is not None:
            raise self._error
        self.num_running = sum(trial.status == TuneTrial.RUNNING for trial in trials)
        self._require_room()
        if self._interrupt.requested and self.stops_at is None:
            self.stops_at = time.monotonic() + GRACE_S
            self._job.stop_file.touch()
        self._kill_hanging([_run_id(trial) for trial in trials if trial.status == TuneTrial.RUNNING])
        self._settle()
        self._on_tick()

    def _kill_hanging(self, run_ids: Sequence[str]) -> None:
        """Kill the workers whose runs have had no step for ``hang_s``; Tune then takes them for dead.

        A process has that long from when it is first seen with the run, whose files may be an earlier one's.
        """
        now = time.monotonic()
        if self._hang_s is None or now - self._watched_at < LOOK_S:
            return
        self._watched_at = now
        for run_id in run_ids:
            trial = self._job.trials[run_id]
            owner = trial.lock.owner()
            if owner is None or owner.launch != trial.launch:
                continue
            process, since = self._seen.get(run_id, (None, now))
            if process != owner.process:
                self._seen[run_id] = owner.process, now
            elif now - since > self._hang_s and hangs(trial.directory, self._hang_s) and kill(owner.process):
                self._seen[run_id] = owner.process, math.inf  # once
                self._say(f"kills the process of {trial.label} ({run_id}): no step for {self._hang_s:g} s (ray.hang_s)")

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        """Set a run failed whose failure its worker could not write down; put down in Tune's table that one was
        stopped by the scheduler, which is told nowhere else there."""
        if result.get("done") and result.get("state") == "running":
            result["state"] = STOPPED
        if ACCOUNT in result:
            self._fail(_run_id(trial), _last_line(result[ACCOUNT]), result[ACCOUNT])

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._lost(trial)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._lost(trial)

    def _lost(self, trial: TuneTrial) -> None:
        """Judge what the loss of a run's worker means: that it goes on in another, or, the last time, that it has
        failed. A run that Tune gives up earlier is left as it is, and handed out again by the sweep. A node that does
        not see the runs' folder is left out. Workers that cannot even start end the sweep: they would fail every
        run."""
        run_id, account = _run_id(trial), _account(trial)
        last = account.rpartition(FAILURE)[2]
        if BLIND in last:
            trial.max_failures += 1  # no failure of the run's
            self._leave_out(_last_line(last).rpartition(BLIND)[2])
            return
        if "error raised in its creation task" in last:
            self._error = RuntimeError(f"no worker starts on a node of the Ray cluster: {_last_line(last)}")
            return
        self._deaths[run_id] += 1
        what = "node" if "node has died" in last or "node was terminated" in last else "worker process"
        if self._deaths[run_id] > self._node_retries:
            self._fail(run_id, _reason(what, self._deaths[run_id]), account)
        else:
            label = self._job.trials[run_id].label
            self._say(f"a {what} died under {label} ({run_id}), which goes on {_ON_ANOTHER[what]}")

    def _leave_out(self, node_id: str) -> None:
        """Hand nothing more to a node that came later than the sweep and does not see the runs' folder."""
        for node in alive():
            if node["NodeID"] == node_id:
                leave_out(node_id, put(node, next(iter(self._job.trials.values())).pool, "it is not there"), self._say)

    def _fail(self, run_id: str, reason: str, account: str) -> None:
        try:
            mark_failed(self._job.trials[run_id], reason, account)
        except OSError as error:  # a full disk
            self._error = error

    def _require_room(self) -> None:
        """Raise a ``RuntimeError`` where for `NO_NODE_S` no run has been worked on and no node has had room for one."""
        now = time.monotonic()
        if self.num_running:
            self._had_room_at = now
        elif now - self._looked_at > LOOK_S:
            self._looked_at = now
            if any(self._share.fits(node["Resources"]) for node in alive()):
                self._had_room_at = now
        if now - self._had_room_at > NO_NODE_S:
            raise RuntimeError(
                "no node of the Ray cluster that has room for a trial is left; the same command goes on where this "
                "one stopped"
            )


class Stopping(tune.Stopper):
    """The Tuner's rule for its end: once an interrupt is requested, and what ran has been saved, nothing more is
    begun."""

    def __init__(self, board: Board):
        self._board = board

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        deadline = self._board.stops_at
        return deadline is not None and (not self._board.num_running or time.monotonic() > deadline)


_ON_ANOTHER = {"node": "on another", "worker process": "in another"}


def _run_id(trial: TuneTrial) -> str:
    return trial.config[RUN]["id"]


def _account(trial: TuneTrial) -> str:
    """Return what Ray says of a Tune trial's failures so far, the last at the end."""
    return Path(trial.error_file).read_text() if trial.error_file else "Ray gave no reason\n"


def _reason(what: str, times: int) -> str:
    """Put into one line what became of a run's workers."""
    in_all = f", {times} times in all" if times > 1 else ""
    if what == "node":
        return f"the node it ran on died{in_all}"
    return f"its worker process died{in_all}: killed, out of memory, or a crash in native code"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["Ray gave no reason"])[-1]
