"""Decide which trial runs on which worker of a Ray cluster, until each has its verdict, and what a worker's death means
for its trial."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.interrupt import Interrupt
from sweeps.launchers.ray.cluster import TICK_S
from sweeps.launchers.ray.workers import Held, Workers
from sweeps.launchers.serial import RunTrial
from sweeps.trial import Trial, mark_failed

GRACE_S = 60.0  # after Ctrl-C the steps under way have this long to end and be saved
NODE_DEATH_S = 20.0  # a worker is seen to die before its node is known to be dead
LAST_BREATH_S = 5.0  # a dead node's processes find out that they are alone; until then they may still write
NO_NODE_S = 120.0  # a cluster may start a node in place of one that died


@dataclass(frozen=True)
class Death:
    """A worker that died under a trial, ``at`` by the monotonic clock; ``account``: what Ray says of it."""

    index: int
    node_id: str
    account: str
    at: float


class Dispatch:
    """The trials of one launch as they are handed out to workers. ``say``: takes a line for the user."""

    def __init__(
        self,
        trials: Sequence[Trial],
        run: RunTrial,
        workers: Workers,
        *,
        node_retries: int,
        on_tick: Callable[[], None],
        interrupt: Interrupt,
        say: Callable[[str], None],
    ):
        self._trials, self._run, self._workers, self._node_retries = trials, run, workers, node_retries
        self._on_tick, self._interrupt, self._say = on_tick, interrupt, say
        self._queue = deque(range(len(trials)))
        self._busy: dict[Any, tuple[Held, int]] = {}
        self._deaths: list[Death] = []
        self._retried: Counter[int] = Counter()
        self._stops_at: float | None = None
        self._last_worker_at = time.monotonic()

    def work(self) -> None:
        """Hand out trials until every one has ended or, once an interrupt is requested, those that run are saved.
        Errors: ``RuntimeError`` where no node is left."""
        while self._queue or self._busy or self._deaths:
            if self._interrupt.requested and self._stops_at is None:
                self._stop()
            if self._stops_at is None:
                self._hand_out()
            elif not self._busy or time.monotonic() > self._stops_at:
                return
            self._wait()
            self._settle()
            self._on_tick()

    def _stop(self) -> None:
        import ray

        self._stops_at = time.monotonic() + GRACE_S
        self._queue.clear()
        self._deaths.clear()
        for pending in self._busy:
            ray.cancel(pending)

    def _hand_out(self) -> None:
        """Start workers that are missing, and give waiting trials to those that are idle. Errors: ``RuntimeError``
        where for `NO_NODE_S` there has been no worker and no node to start one on."""
        if refused := self._workers.grow(len(self._queue) + len(self._busy)):
            self._say(f"left out: {refused}")
        while self._queue and self._workers.idle:
            worker, index = self._workers.idle.pop(), self._queue.popleft()
            self._busy[worker.handle.run.remote(self._trials[index], self._run)] = worker, index
        if self._workers.total or not self._queue:
            self._last_worker_at = time.monotonic()
        elif time.monotonic() - self._last_worker_at > NO_NODE_S:
            raise RuntimeError(
                "no node of the Ray cluster that has room for a trial is left; the same command goes on where this "
                "one stopped"
            )

    def _wait(self) -> None:
        """Wait for at most `TICK_S`, and take in what happens meanwhile: trials that end, workers that have started."""
        import ray

        pending = [*self._busy, *self._workers.starting]
        if not pending:
            time.sleep(TICK_S)
            return
        for ended in ray.wait(pending, timeout=TICK_S)[0]:
            if ended in self._busy:
                self._ended(ended)
            else:
                self._workers.started(ended)

    def _ended(self, pending: Any) -> None:
        """Take in the end of a trial's task: its worker is idle again, or has died, which `_settle` then judges."""
        import ray
        from ray import exceptions

        worker, index = self._busy.pop(pending)
        try:
            ray.get(pending)
        except exceptions.TaskCancelledError:
            pass
        except exceptions.RayTaskError as error:  # not even its failure could be written down
            mark_failed(self._trials[index], _last_line(str(error)), str(error))
        except exceptions.RayError as error:
            self._workers.forget(worker)
            self._deaths.append(Death(index, worker.node_id, f"{error}\n", time.monotonic()))
            return
        self._workers.idle.append(worker)

    def _settle(self) -> None:
        """Settle the deaths of workers: a trial whose node died goes on on another one, at its last checkpoint; one
        that lost its process on a node that lives has failed."""
        for death in list(self._deaths):
            elapsed_s = time.monotonic() - death.at
            if not self._workers.is_alive(death.node_id):
                if elapsed_s < LAST_BREATH_S:
                    continue
                self._retry(death)
            elif self._workers.is_alone() or elapsed_s > NODE_DEATH_S:
                mark_failed(self._trials[death.index], _reason(death.account), death.account)
            else:
                continue
            self._deaths.remove(death)

    def _retry(self, death: Death) -> None:
        trial = self._trials[death.index]
        if self._retried[death.index] >= self._node_retries:
            mark_failed(trial, f"the node it ran on died, {self._retried[death.index] + 1} times in all", death.account)
            return
        self._retried[death.index] += 1
        self._queue.appendleft(death.index)
        self._say(f"a node died under {trial.label} ({trial.run_id}), which goes on on another")


def _reason(account: str) -> str:
    """Put Ray's account into one line: what ended the process, or the last line of a traceback."""
    if "Worker exit type" in account or "actor died" in account:
        return "its worker process died: killed, out of memory, or a crash in native code"
    return _last_line(account)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["Ray gave no reason"])[-1]
