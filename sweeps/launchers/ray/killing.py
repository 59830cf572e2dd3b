"""Kill a hanging Ray worker on any node.

A stopped process ignores Ray's own request to end.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from stability.runs.processes import Process
from sweeps.launchers.ray.cluster import list_living_nodes


def kill(process: Process) -> bool:
    """Kill a process on its node, by a task if that is another node.

    The result is False if the node is not alive, or the process had ended on this machine.
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
