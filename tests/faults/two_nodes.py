"""Two Ray nodes on this machine, one killed in the middle of a sweep: the sweep finishes, and its numbers are those of
an undisturbed one.

    python -m tests.faults.two_nodes [FOLDER [LAUNCHER]]

The trials of the dead node go on on the other one at their last checkpoint; none is counted as failed, none that had
finished is run again.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from sweeps import launch
from sweeps.launchers import set_environment
from sweeps.trial import Trial
from tests.sweeps.real import make_sweep

SWEEP = ("steps=600", "evaluation.every_steps=200", "checkpoint.every_steps=50", "seeds=2")


@contextmanager
def two_nodes() -> Iterator[tuple[str, Any, Any]]:
    """(address, cluster, the node to kill) of a cluster of two raylets with one CPU each."""
    with set_environment({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}):
        import ray
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        try:
            node = cluster.add_node(**size)
            yield cluster.address, cluster, node
        finally:
            ray.shutdown()
            cluster.shutdown()


class KillOnce(threading.Thread):
    """Kills the second node once two trials are in the middle."""

    def __init__(self, trials: Sequence[Trial], cluster: Any, node: Any, after_step: int):
        super().__init__(daemon=True)
        self.trials, self.cluster, self.node, self.after_step = trials, cluster, node, after_step
        self.steps: list[int] = []

    def run(self) -> None:
        while not self.steps:
            time.sleep(0.05)
            running = [trial for trial in self.trials if trial.directory.status()["state"] == "running"]
            if len(running) == 2 and all(_last_step(trial) > self.after_step for trial in running):
                self.steps = [_last_step(trial) for trial in running]
                print(f"kills a node at steps {self.steps} of {[trial.label for trial in running]}", flush=True)
                self.cluster.remove_node(self.node, allow_graceful=False)


def _last_step(trial: Trial) -> int:
    file = trial.directory.metrics_file
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


def main(folder: Path, launcher: str = "ray", overrides: Sequence[str] = SWEEP, after_step: int = 120) -> None:
    spec, undisturbed = make_sweep(folder, *overrides, pool="undisturbed")
    launch.run(spec, undisturbed, console=Console(file=io.StringIO()))
    with two_nodes() as (address, cluster, node):
        spec, trials = make_sweep(
            folder, *overrides, f"launcher={launcher}", f"ray.address={address}", pool="disturbed"
        )
        kill, started = KillOnce(trials, cluster, node, after_step), time.monotonic()
        kill.start()
        outcome = launch.run(spec, trials, console=Console(file=sys.stdout, force_terminal=False, width=160))
    assert kill.steps, "no node was killed: the trials were too short"
    assert not outcome.failures and not outcome.interrupted, outcome
    for one, other in zip(undisturbed, trials, strict=True):
        assert one.directory.metrics_file.read_bytes() == other.directory.metrics_file.read_bytes(), one.label
    print(
        f"{len(trials)} runs, one of two nodes killed: all finished in {time.monotonic() - started:.0f} s, "
        "metrics.jsonl byte for byte the undisturbed ones"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *sys.argv[2:3])
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
