"""Ray as one driver has it: started on this machine, or joined."""

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

from sweeps.environment import environment, of_driver, of_workers
from sweeps.gpu_memory import Peak, kinds, probe
from sweeps.interrupt import Interrupt
from sweeps.launchers.ray import address as ray_address
from sweeps.launchers.ray import head as ray_head
from sweeps.launchers.ray.head import Head
from sweeps.launchers.ray.private import admitted
from sweeps.launchers.ray.share import Share, require_room
from sweeps.launchers.ray.shared_folder import RULE, check, unseen
from sweeps.launchers.ray.watch import CLUSTER_S, GONE_S, Watch
from sweeps.trial import Trial

TICK_S = 0.2


@dataclass
class Session:
    """Ray as it runs within `cluster`. ``head``: of a Ray of its own; ``dashboard``: HOST:PORT of the dashboard of one
    that was joined, until the user is told; ``peaks``: measured GPU memory, by the kinds of runs; ``is_admitted``:
    whether all nodes were seen to share the runs' folder; ``left_out``: ids of those that came later and don't."""

    head: Head | None
    watch: Watch
    dashboard: str = ""
    peaks: dict[frozenset[str], Peak] = field(default_factory=dict)
    is_admitted: bool = False
    left_out: set[str] = field(default_factory=set)

    def require(self) -> None:
        """Raise a ``RuntimeError`` where Ray is gone: whoever asks that for anything then waits for minutes."""
        if self.head is not None:
            self.head.require()
        self.watch.require()


_session: Session | None = None


def session() -> Session:
    """Return the session that is open."""
    assert _session is not None, "Ray is used within `cluster` only"
    return _session


@contextmanager
def cluster(*, threads: int = 1, address: str | None = None, num_cpus: int | None = None) -> Iterator[Path | None]:
    """Start Ray, quiet, in a temporary folder (yielded) that goes with it; one that runs already is used as it is and
    left running.

    Workers inherit this process's import path, so that a checkout that is not installed works from any folder, and
    ``threads`` for OpenMP. Several launches within one ``with`` share it.
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
    """Make this process a driver of Ray: of one of its own, or of one that it joins."""
    with ExitStack() as stack:
        stack.enter_context(environment(of_driver() | of_workers(threads)))
        stack.enter_context(_quiet())
        ray, head, dashboard = import_ray(), None, ""
        is_ours = not ray.is_initialized()
        if is_ours and address is None:
            head = stack.enter_context(ray_head.head(threads, num_cpus))
            stack.enter_context(admitted(head.access))
        watch = stack.enter_context(Watch())
        if is_ours:
            stack.callback(ray.shutdown)
            dashboard = _join(ray, address, head)
        watch.begin(_watched(ray, head))
        yield Session(head, watch, dashboard)


def _watched(ray: Any, head: Head | None) -> dict[str, tuple[str, float]]:
    """Return what this driver cannot do without, as `Watch.begin` takes it: the head, and the node that it is on."""
    context = ray.get_runtime_context()
    here = next(node for node in alive() if node["NodeID"] == context.get_node_id())
    return {
        "the head of the Ray cluster": (context.gcs_address, CLUSTER_S if head is None else GONE_S),
        "Ray's node on this machine": (f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}", GONE_S),
    }


def require(share: Share, address: str | None) -> None:
    """Refuse what Ray cannot run, before anything is begun or on record. Errors: ``RuntimeError`` where this machine
    holds no trial of that share, or no cluster is at ``address``."""
    if _session is not None:
        return
    if address is not None:
        ray_address.check(address)
        return
    import torch

    require_room(share, [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}])


def admit(pool: str, say: Callable[[str], None]) -> None:
    """Have only nodes in use that see the runs' folder. Errors: ``RuntimeError`` where one doesn't, before anything was
    begun in this session; later such a node is left out."""
    import ray

    here, own = ray.get_runtime_context().get_node_id(), session()
    others = [node for node in alive() if node["NodeID"] != here]
    if others and not own.is_admitted:
        check(pool, others)
    elif others:
        for node_id, told in unseen(pool, others).items():
            leave_out(node_id, told, say)
    own.is_admitted = True


def leave_out(node_id: str, told: str, say: Callable[[str], None]) -> None:
    """Hand nothing more to a node, and say so, once."""
    if node_id not in session().left_out:
        session().left_out.add(node_id)
        say(f"{told}; it is left out ({RULE})")


def alive() -> list[dict[str, Any]]:
    """Return the nodes that are alive and not left out, as ``ray.nodes()`` describes them."""
    import ray

    left_out = _session.left_out if _session else ()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in left_out]


def gpus_of(
    trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt, say: Callable[[str], None]
) -> float:
    """Return the share of a GPU that each trial gets: whole ones where several devices share a run, else by the memory
    that the kinds of runs take."""
    import ray

    if trials[0].device == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0.0
    if trials[0].devices > 1:
        return float(trials[0].devices)
    own, key = session(), frozenset(kinds(trials))
    if key not in own.peaks:
        peak = _measured(trials, on_tick, interrupt)
        if peak is None:
            return 0.0
        own.peaks[key] = peak
        say(peak.described())
    return own.peaks[key].share


def _measured(trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt) -> Peak | None:
    """Run the probe of GPU memory in a process of its own, with a GPU to itself; None once an interrupt is requested.
    Errors: ``RuntimeError`` where it could not end."""
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
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(
            f"the memory that a trial takes could not be measured ({reason}); give it a share of a GPU: "
            "gpus_per_trial=0.25"
        ) from None


def import_ray(name: str = "ray") -> Any:
    """Import Ray, or the part of it named. Errors: ``RuntimeError`` where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"launcher=ray needs Ray ({error}): pip install 'ray[tune]', or choose launcher=serial"
        ) from None


def _join(ray: Any, address: str | None, head: Head | None) -> str:
    """Join the Ray at ``address``, or that of ``head``; return HOST:PORT of its dashboard, "" without. Errors:
    ``RuntimeError`` where it cannot be joined."""
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    if head is not None:
        ray.init(address=head.address, **quiet)
        return ""
    # a cluster's workers don't inherit this process's environment
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_CHDIR_TO_TRIAL_DIR")
    inherited = {name: os.environ[name] for name in names}
    try:
        return ray.init(address=address, runtime_env={"env_vars": inherited}, **quiet).dashboard_url or ""
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"ray.address={address}: no Ray cluster that can be joined ({reason}); start one with: ray start --head"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's notes: they say nothing that the live table and the run directories don't say better."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
