"""Start a Ray on this machine, or join one, for a single driver."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stability.printable import line_of
from sweeps.gpu_memory import Peak, kinds, probe
from sweeps.launchers import Interrupt, list_driver_variables, list_worker_variables, set_environment
from sweeps.launchers.ray import address as ray_address
from sweeps.launchers.ray import head as ray_head
from sweeps.launchers.ray.head import Head
from sweeps.launchers.ray.private import join_private
from sweeps.launchers.ray.share import Share, require_room
from sweeps.launchers.ray.shared_folder import RULE, check, find_unseen
from sweeps.launchers.ray.watch import CLUSTER_S, GONE_S, Watch
from sweeps.trial import Trial

TICK_S = 0.2


@dataclass
class Session:
    """The Ray within an open `cluster`.

    Attributes:
        head: the head of the driver's own Ray, or None for a joined cluster.
        watch: the thread for detecting the loss of Ray.
        dashboard: HOST:PORT of a joined cluster's dashboard, until it was printed.
        peaks: measured GPU memory, by the kinds of runs.
        is_admitted: whether all nodes were found to share the runs' folder.
        left_out: ids of later nodes without access to it.
    """

    head: Head | None
    watch: Watch
    dashboard: str = ""
    peaks: dict[frozenset[str], Peak] = field(default_factory=dict)
    is_admitted: bool = False
    left_out: set[str] = field(default_factory=set)

    def require(self) -> None:
        """Raise a ``RuntimeError`` if Ray is gone; any request to it would block for minutes."""
        if self.head is not None:
            self.head.require()
        self.watch.require()


_session: Session | None = None


def session() -> Session:
    """Return the open session."""
    assert _session is not None, "Ray is used within `cluster` only"
    return _session


@contextmanager
def cluster(*, threads: int = 1, address: str | None = None, num_cpus: int | None = None) -> Iterator[Path | None]:
    """Start Ray quietly in a temporary folder, or join a running one; yield the folder or None.

    The folder is removed at the end; a joined Ray is left running. Workers inherit this process's import path, so an
    uninstalled checkout works from any folder. Launches within one ``with`` block share the Ray.

    Args:
        threads: OpenMP threads of a worker.
        address: address of a cluster to join, or None to start a Ray.
        num_cpus: CPUs of a started Ray, or None for all.
    """
    global _session
    if _session is not None:
        import_ray()
        yield _session.head and _session.head.scratch
        return
    with _ray(threads, address, num_cpus) as _session:
        try:
            yield _session.head and _session.head.scratch
        finally:
            _session = None


@contextmanager
def _ray(threads: int, address: str | None, num_cpus: int | None) -> Iterator[Session]:
    """Make this process a driver of its own Ray or of a joined one."""
    with ExitStack() as stack:
        stack.enter_context(set_environment(list_driver_variables() | list_worker_variables(threads)))
        stack.enter_context(_silence())
        ray, head, dashboard = import_ray(), None, ""
        is_ours = not ray.is_initialized()
        if is_ours and address is None:
            head = stack.enter_context(ray_head.start_head(threads, num_cpus))
            stack.enter_context(join_private(head.access))
        watch = stack.enter_context(Watch())
        if is_ours:
            stack.callback(ray.shutdown)
            dashboard = _join(ray, address, head)
        watch.begin(_list_watched(ray, head))
        yield Session(head, watch, dashboard)


def _list_watched(ray: Any, head: Head | None) -> dict[str, tuple[str, float]]:
    """Return the addresses of Ray's head and this machine's node, for `Watch.begin`."""
    context = ray.get_runtime_context()
    here = next(node for node in list_living_nodes() if node["NodeID"] == context.get_node_id())
    return {
        "the head of the Ray cluster": (context.gcs_address, CLUSTER_S if head is None else GONE_S),
        "Ray's node on this machine": (f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}", GONE_S),
    }


def require(share: Share, address: str | None) -> None:
    """Refuse an impossible request to Ray, before anything is on record.

    Raises:
        RuntimeError: this machine has too few resources for the share, or no cluster answers at ``address``.
    """
    if _session is not None:
        return
    if address is not None:
        ray_address.check(address)
        return
    import torch

    require_room(share, [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}])


def admit(pool: str, say: Callable[[str], None]) -> None:
    """Leave out nodes without access to the runs' folder.

    Raises:
        RuntimeError: such a node exists before anything began in this session; later nodes are left out.
    """
    import ray

    here, own = ray.get_runtime_context().get_node_id(), session()
    others = [node for node in list_living_nodes() if node["NodeID"] != here]
    if others and not own.is_admitted:
        check(pool, others)
    elif others:
        for node_id, told in find_unseen(pool, others).items():
            leave_out(node_id, told, say)
    own.is_admitted = True


def leave_out(node_id: str, told: str, say: Callable[[str], None]) -> None:
    """Stop using a node, and print the reason once.

    Args:
        node_id: Ray's id of the node.
        told: the reason.
        say: prints a line for the user.
    """
    if node_id not in session().left_out:
        session().left_out.add(node_id)
        say(f"{told}; it is left out ({RULE})")


def list_living_nodes() -> list[dict[str, Any]]:
    """Return the living nodes, except left-out ones, in the format of ``ray.nodes()``."""
    import ray

    left_out = _session.left_out if _session else ()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in left_out]


def choose_gpus(
    trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt, say: Callable[[str], None]
) -> float:
    """Return the GPUs per trial, measuring the runs' memory if needed.

    A run on several devices gets whole GPUs, any other a share according to its kinds' peak memory.

    Args:
        trials: the trials of a launch.
        on_tick: called while it waits.
        interrupt: ends the measurement once requested.
        say: prints a line for the user.

    Returns:
        GPUs per trial; 0 without GPUs, or if interrupted.
    """
    import ray

    if trials[0].device == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0.0
    if trials[0].devices > 1:
        return float(trials[0].devices)
    own, key = session(), frozenset(kinds(trials))
    if key not in own.peaks:
        peak = _measure_memory(trials, on_tick, interrupt)
        if peak is None:
            return 0.0
        own.peaks[key] = peak
        say(peak.describe())
    return own.peaks[key].share


def _measure_memory(trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt) -> Peak | None:
    """Measure the trials' GPU memory in a task with its own GPU; None once interrupted.

    Raises:
        RuntimeError: the measurement failed.
    """
    import ray
    from ray import exceptions

    pending = ray.remote(num_cpus=1, num_gpus=1, max_calls=1, max_retries=0)(probe).remote(list(trials))
    while not ray.wait([pending], timeout=TICK_S)[0]:
        on_tick()
        if interrupt.requested:
            ray.cancel(pending, force=True)
            return None
    try:
        return ray.get(pending)
    except exceptions.RayError as error:
        reason = line_of(error, -1)
        raise RuntimeError(
            f"the memory that a trial takes could not be measured ({reason}); give it a share of a GPU: "
            "gpus_per_trial=0.25"
        ) from None


def import_ray(name: str = "ray") -> Any:
    """Import Ray, or a named module of it; raise a ``RuntimeError`` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"launcher=ray needs Ray ({error}): pip install 'ray[tune]', or choose launcher=serial"
        ) from None


def _join(ray: Any, address: str | None, head: Head | None) -> str:
    """Join a Ray, and return HOST:PORT of its dashboard, or "" without one.

    Raises:
        RuntimeError: it cannot be joined.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    if head is not None:
        ray.init(address=head.address, **quiet)
        return ""
    # workers of a joined cluster do not inherit this process's environment
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_CHDIR_TO_TRIAL_DIR")
    inherited = {name: os.environ[name] for name in names}
    try:
        return ray.init(address=address, runtime_env={"env_vars": inherited}, **quiet).dashboard_url or ""
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = line_of(error)
        raise RuntimeError(
            f"ray.address={address}: no Ray cluster that can be joined ({reason}); start one with: ray start --head"
        ) from None


@contextmanager
def _silence() -> Iterator[None]:
    """Silence Ray's messages; the live table and run folders show the same facts."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
