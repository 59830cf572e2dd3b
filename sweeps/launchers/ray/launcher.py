"""Trials side by side: one actor of Ray for each share of the machine, or of a cluster, reused from trial to trial. Ray
is imported only here and below.

Plain actors rather than Ray Tune: Tune wants storage of its own that every node sees, counts a dead node as the trial's
failure, and starts trials anew.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sweeps.environment import environment, of_driver, of_workers
from sweeps.gpu_memory import Peak, kinds, probe
from sweeps.interrupt import Interrupt
from sweeps.launchers.ray import address as ray_address
from sweeps.launchers.ray import head as ray_head
from sweeps.launchers.ray.dispatch import TICK_S, Dispatch
from sweeps.launchers.ray.head import Head
from sweeps.launchers.ray.shared_folder import check
from sweeps.launchers.ray.workers import Share, Workers, require_room
from sweeps.launchers.serial import RunTrial
from sweeps.trial import Trial, run_trial

NODE_RETRIES = 2


@dataclass
class _Session:
    """Ray as it runs within `cluster`, with the workers that launches leave to those that follow."""

    head: Head | None
    workers: Workers | None = None
    peaks: dict[frozenset[str], Peak] = field(default_factory=dict)


_session: _Session | None = None


def launch(
    trials: Sequence[Trial],
    *,
    on_tick: Callable[[], None],
    interrupt: Interrupt,
    cpus_per_trial: float = 1.0,
    gpus_per_trial: float | Literal["auto"] = 0.0,
    address: str | None = None,
    node_retries: int = NODE_RETRIES,
    say: Callable[[str], None] = lambda line: None,
    run: RunTrial = run_trial,
) -> None:
    """Run every trial on this machine's cores (or on the Ray cluster at ``address``), each holding its share of CPUs
    and GPUs.

    ``gpus_per_trial="auto"``: as many trials on a GPU as their measured memory allows. A trial whose worker dies is set
      ``failed``, with Ray's account of it as traceback; one whose node dies goes on on another, up to ``node_retries``
      times; the others go on. Once an interrupt is requested, steps under way end, their trials are closed, which saves
      them, and this returns. Ray that runs already is used and left running. Errors: ``RuntimeError`` where Ray is
      missing, a trial asks for more than there is, or a node does not see the runs' folder.
    """
    if not trials:
        return
    with cluster(threads=int(trials[0].spec["threads"]), address=address):
        if not interrupt.requested:
            gpus = _gpus_of(trials, on_tick, interrupt, say) if gpus_per_trial == "auto" else gpus_per_trial
        if not interrupt.requested:
            workers = _workers(Share(cpus_per_trial, gpus), trials[0].pool)
            Dispatch(
                trials,
                run,
                workers,
                node_retries=node_retries,
                on_tick=partial(_tick, on_tick),
                interrupt=interrupt,
                say=say,
            ).work()


def _tick(on_tick: Callable[[], None]) -> None:
    """Errors: ``RuntimeError`` where the Ray of this machine has died."""
    assert _session is not None
    if _session.head is not None:
        _session.head.require()
    on_tick()


@contextmanager
def cluster(*, threads: int = 1, address: str | None = None, num_cpus: int | None = None) -> Iterator[Path | None]:
    """Ray, quiet, in a temporary folder (yielded) that goes with it; one that runs already is used as it is and left
    running.

    Workers inherit this process's import path, so that a checkout that is not installed works from any folder, and
    ``threads`` for OpenMP. Several launches within one ``with`` share its workers.
    """
    global _session
    if _session is not None:
        _import_ray()
        yield _session.head and _session.head.scratch
        return
    with _ray(threads, address, num_cpus) as head:
        _session = _Session(head)
        try:
            yield head and head.scratch
        finally:
            _close()


@contextmanager
def _ray(threads: int, address: str | None, num_cpus: int | None) -> Iterator[Head | None]:
    """This process as a driver of Ray; the head of a Ray of its own."""
    with ExitStack() as stack:
        stack.enter_context(environment(of_driver() | of_workers(threads)))
        stack.enter_context(_quiet())
        ray, head = _import_ray(), None
        if not ray.is_initialized():
            if address is None:
                stack.enter_context(environment({"RAY_AUTH_MODE": "disabled"}))
                head = stack.enter_context(ray_head.head(threads, num_cpus))
            stack.callback(ray.shutdown)
            _join(ray, address, head)
        yield head


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


def _close() -> None:
    global _session
    session, _session = _session, None
    if session is not None and session.workers is not None:
        session.workers.close()


def _workers(share: Share, pool: str) -> Workers:
    """The workers, opened on nodes that see the pool: those of the launch before, where they hold the same share."""
    assert _session is not None
    if _session.workers is not None and _session.workers.share != share:
        _let_go()
    workers = _session.workers = _session.workers or Workers(share, partial(_admit, pool))
    workers.open()
    return workers


def _let_go() -> None:
    """End the workers of the launch before."""
    assert _session is not None
    if _session.workers is not None:
        _session.workers.close()
        _session.workers = None


def _admit(pool: str, nodes: Sequence[dict[str, Any]]) -> None:
    """Errors: ``RuntimeError`` where a node other than the driver's own doesn't see the runs' folder."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    if others := [node for node in nodes if node["NodeID"] != here]:
        check(pool, others)


def _gpus_of(
    trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt, say: Callable[[str], None]
) -> float:
    """The share of a GPU that each trial gets: whole ones where several devices share a run, else by the memory that
    the kinds of runs take."""
    import ray

    if trials[0].device == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0.0
    if trials[0].devices > 1:
        return float(trials[0].devices)
    assert _session is not None
    key = frozenset(kinds(trials))
    if key not in _session.peaks:
        _let_go()  # of shares of the GPU that the probe takes whole
        peak = _measured(trials, on_tick, interrupt)
        if peak is None:
            return 0.0
        _session.peaks[key] = peak
        say(peak.described())
    return _session.peaks[key].share


def _measured(trials: Sequence[Trial], on_tick: Callable[[], None], interrupt: Interrupt) -> Peak | None:
    """The probe in a process of its own, with a GPU to itself; None once an interrupt is requested. Errors:
    ``RuntimeError`` where it could not end."""
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


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise RuntimeError(f"launcher=ray needs Ray ({error}): pip install ray, or choose launcher=serial") from None


def _join(ray: Any, address: str | None, head: Head | None) -> None:
    """The Ray at ``address``, or that of ``head``. Errors: ``RuntimeError`` where it cannot be joined."""
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    if head is not None:
        ray.init(address=head.address, **quiet)
        return
    # a cluster's workers don't inherit this process's environment
    inherited = {
        name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    }
    try:
        ray.init(address=address, runtime_env={"env_vars": inherited}, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"ray.address={address}: no Ray cluster that can be joined ({reason}); start one with: ray start --head"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's notes say nothing that the live table and the run directories don't say better."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
