"""The workers of a Ray cluster: processes pinned to nodes, each holding its share of CPUs and GPUs, reused from trial
to trial and launch to launch."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from stability.runs.processes import Process
from stability.startup import uncollected
from sweeps.gpu_memory import release
from sweeps.launchers.ray.cluster import alive
from sweeps.launchers.ray.share import Share, require_room
from sweeps.launchers.ray.shared_folder import name_of
from sweeps.launchers.serial import RunTrial, steps_of
from sweeps.trial import Trial

LOOK_S = 1.0  # between two looks at which nodes there are
MOST_FAILED_STARTS = 3  # in a row; one may be killed by chance


class Worker:
    """The actor that runs trials. It keeps nothing from one trial to the next but the imported modules. ``driver``: the
    process that waits for what it does."""

    def __init__(self, driver: Process):
        self._driver = driver
        with uncollected():
            importlib.import_module("stability.training.run")

    def ready(self) -> int:
        return os.getpid()

    def run(self, trial: Trial, run: RunTrial) -> None:
        """Work through a trial. Cancelled, the worker stops after the step under way and closes the trial, which saves
        it; where the driver is on the same machine and gone, it does the same and then ends its process."""
        import ray

        context = ray.get_runtime_context()
        try:
            with closing(steps_of(trial, run)) as steps:
                for _ in steps:
                    if context.is_canceled():
                        return
                    if self._driver.lives is False:
                        break
                else:
                    return
            os._exit(1)  # nobody reads what it would return
        finally:
            release()


@dataclass(frozen=True, eq=False)
class Held:
    """A worker as the driver knows it: the actor's handle and the node that it is pinned to."""

    handle: Any
    node_id: str


class Workers:
    """The workers of a driver: starts them where there is room, and knows which are idle. ``admit(nodes)`` refuses
    nodes that a trial cannot run on, by ``RuntimeError``."""

    def __init__(self, share: Share, admit: Callable[[Sequence[dict[str, Any]]], None]):
        self.share = share
        self.idle: list[Held] = []
        self.starting: dict[Any, Held] = {}
        self._held: list[Held] = []
        self._admit = admit
        self._refused: dict[str, str] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._looked_at = float("-inf")
        self._failed_starts = 0

    @property
    def total(self) -> int:
        """The number of workers that there are or that are starting."""
        return len(self._held)

    def open(self) -> None:
        """Begin a launch: start a worker wherever there is room. Errors: ``RuntimeError`` where no node has room for a
        single worker, or one of them is refused."""
        nodes = alive()
        require_room(self.share, [node["Resources"] for node in nodes])
        self._admit(nodes)
        self._nodes = {node["NodeID"]: node for node in nodes}
        self._looked_at = time.monotonic()
        # those of an earlier launch may have died since
        self.starting |= {worker.handle.ready.remote(): worker for worker in self.idle}
        self.idle = []

    def grow(self, num_wanted: int) -> str:
        """Start workers up to a number, or as many as the nodes hold, nodes that came later among them. Return what a
        newly refused node lacks, or ""."""
        refused = self._look()
        while self.total < num_wanted:
            held = [worker.node_id for worker in self._held]
            room = {
                node_id: self.share.fits(node["Resources"]) - held.count(node_id)
                for node_id, node in self._nodes.items()
            }
            node_id = max(room, key=lambda key: room[key], default=None)
            if node_id is None or room[node_id] <= 0:
                break
            self._start(node_id)
        return refused

    def is_alive(self, node_id: str) -> bool:
        return any(node["NodeID"] == node_id for node in alive())

    def is_alone(self) -> bool:
        """Return whether there never was but one node, so that a dead worker is no dead node's."""
        import ray

        return len(ray.nodes()) == 1

    def started(self, pending: Any) -> None:
        """Take in the answer of a worker that was starting: it is idle, or failed to start. Errors: ``RuntimeError``
        where workers fail again and again on a node that lives."""
        import ray
        from ray import exceptions

        worker = self.starting.pop(pending)
        try:
            ray.get(pending)
        except exceptions.RayError as error:
            self.forget(worker)
            if not self.is_alive(worker.node_id):
                return
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                reason = str(error).strip().splitlines()[-1]
                raise RuntimeError(
                    f"no worker starts on node {name_of(self._nodes[worker.node_id])} of the Ray cluster: {reason}"
                ) from None
        else:
            self._failed_starts = 0
            self.idle.append(worker)

    def forget(self, worker: Held) -> None:
        """Drop a worker that is dead."""
        self._held.remove(worker)

    def close(self) -> None:
        """End the processes, those that did not come to an end of their trial among them."""
        import ray

        for worker in self._held:
            ray.kill(worker.handle)
        self._held, self.idle, self.starting = [], [], {}

    def _start(self, node_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)  # Ray annotates one of its strategies only
        actor = ray.remote(
            num_cpus=self.share.cpus, num_gpus=self.share.gpus, max_restarts=0, scheduling_strategy=there
        )(Worker)
        worker = Held(actor.remote(Process.current()), node_id)
        self._held.append(worker)
        self.starting[worker.handle.ready.remote()] = worker

    def _look(self) -> str:
        """Look, at most every `LOOK_S`, which nodes there are now, and return what a newly refused one lacks, or "". A
        node that came while the sweep ran and does not see the runs' folder gets no trials."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return ""
        refused, living = "", [node for node in alive() if node["NodeID"] not in self._refused]
        for node in living:
            if node["NodeID"] not in self._nodes:
                try:
                    self._admit([node])
                except RuntimeError as error:
                    refused = self._refused[node["NodeID"]] = str(error)
        self._nodes = {node["NodeID"]: node for node in living if node["NodeID"] not in self._refused}
        for worker in [worker for worker in self.idle if worker.node_id not in self._nodes]:
            self.idle.remove(worker)
            self.forget(worker)
        self._looked_at = time.monotonic()
        return refused
