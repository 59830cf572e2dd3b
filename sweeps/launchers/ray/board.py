"""Connect the Tuner's loop with the sweep: live table, failures, interrupts."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from stability.runs.directory import STOPPED
from stability.runs.processes import Process
from sweeps.launchers import Interrupt
from sweeps.launchers.ray.cluster import leave_out, list_living_nodes
from sweeps.launchers.ray.share import Share
from sweeps.launchers.ray.shared_folder import BLIND, describe_failure
from sweeps.launchers.ray.trainable import ACCOUNT, RUN, Job
from sweeps.progress import hangs
from sweeps.trial import mark_failed

GRACE_S = 60.0  # limit after Ctrl-C for steps to end and be saved
LOOK_S = 1.0  # between two checks of the nodes and of hanging runs
FAILURE = "Failure # "  # prefix of each failure in Tune's error file of a trial
NO_NODE_S = 120.0  # a cluster may replace a node that died


class Board(tune.Callback):
    """The sweep's callbacks in the Tuner's loop, called some ten times a second.

    Args:
        job: the launch's work.
        share: each trial's share of a node.
        node_retries: restarts of a run after the loss of its worker or node.
        hang_s: seconds without a step until a worker is killed; None: never.
        on_tick: refreshes the live table.
        settle: marks runs stopped by the scheduler.
        interrupt: ends the launch once requested.
        say: prints a line for the user.
    """

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
        """Return no state: a Tuner pickles its callbacks to restore them, and no Tuner is restored here."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Refresh the sweep's state, or raise the error of an earlier callback.

        Args:
            iteration: Tune's counter, unused.
            trials: Tune's trials.
            **info: unused.
        """
        if self._error is not None:  # raised here: Tune attributes errors of other callbacks to a trial
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
        """Kill workers whose runs had no step for ``hang_s`` seconds; Tune then counts them as dead.

        The limit counts from the process's first observed lock on the run, because the run's files may be older.
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
        """Record a failure not written by the worker, and mark stopped trials.

        Tune's table itself does not mark trials stopped by the scheduler.

        Args:
            iteration: Tune's counter, unused.
            trials: Tune's trials, unused.
            trial: the trial of the result.
            result: the result; its state is changed in place.
            **info: unused.
        """
        if result.get("done") and result.get("state") == "running":
            result["state"] = STOPPED
        if ACCOUNT in result:
            self._fail(_run_id(trial), _last_line(result[ACCOUNT]), result[ACCOUNT])

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Decide on a run whose worker was lost, if Tune replaces it.

        Args:
            iteration: Tune's counter, unused.
            trials: Tune's trials, unused.
            trial: the trial of the worker.
            **info: unused.
        """
        self._handle_loss(trial)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Decide on a run whose worker was lost, if Tune does not replace it.

        Args:
            iteration: Tune's counter, unused.
            trials: Tune's trials, unused.
            trial: the trial of the worker.
            **info: unused.
        """
        self._handle_loss(trial)

    def _handle_loss(self, trial: TuneTrial) -> None:
        """Decide whether a run continues or fails after the loss of its worker.

        It fails after more than ``node_retries`` losses. If Tune gives a run up earlier, its status stays and the sweep
        hands it out again. A node without access to the runs' folder is left out. If workers cannot start at all, the
        sweep ends: every run would fail.
        """
        run_id = _run_id(trial)
        account = Path(trial.error_file).read_text() if trial.error_file else "Ray gave no reason\n"
        last = account.rpartition(FAILURE)[2]
        if BLIND in last:
            trial.max_failures += 1  # the node's fault does not count as a failure of the run
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
        """Leave out a late node without access to the runs' folder."""
        for node in list_living_nodes():
            if node["NodeID"] == node_id:
                leave_out(
                    node_id,
                    describe_failure(node, next(iter(self._job.trials.values())).pool, "it is not there"),
                    self._say,
                )

    def _fail(self, run_id: str, reason: str, account: str) -> None:
        try:
            mark_failed(self._job.trials[run_id], reason, account)
        except OSError as error:  # a full disk
            self._error = error

    def _require_room(self) -> None:
        """Raise a ``RuntimeError`` after `NO_NODE_S` without a running trial or a node with room."""
        now = time.monotonic()
        if self.num_running:
            self._had_room_at = now
        elif now - self._looked_at > LOOK_S:
            self._looked_at = now
            if any(self._share.fits(node["Resources"]) for node in list_living_nodes()):
                self._had_room_at = now
        if now - self._had_room_at > NO_NODE_S:
            raise RuntimeError(
                "no node of the Ray cluster that has room for a trial is left; the same command goes on where this "
                "one stopped"
            )


class Stopping(tune.Stopper):
    """The Tuner's stop rule: after an interrupt, stop once all running trials were saved."""

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


def _reason(what: str, times: int) -> str:
    """Return one line on the loss of a run's workers."""
    in_all = f", {times} times in all" if times > 1 else ""
    if what == "node":
        return f"the node it ran on died{in_all}"
    return f"its worker process died{in_all}: killed, out of memory, or a crash in native code"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["Ray gave no reason"])[-1]


def kill(process: Process) -> bool:
    """Kill a process on its node, by a task if that is another node.

    A stopped process ignores Ray's own request to end. The result is False if the node is not alive, or the process had
    ended on this machine.
    """
    if process.lives is not None:
        return kill_here(process)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in list_living_nodes():
        if node["NodeManagerHostname"] == process.host:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(num_cpus=0, max_retries=0)(kill_here).options(scheduling_strategy=there).remote(process)
            return True
    return False


def kill_here(process: Process) -> bool:
    """Kill a process of this machine, unless another process has its id by now."""
    if not process.lives:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return True
