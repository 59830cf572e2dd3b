"""Trials side by side: one actor of Ray for each share of the machine, or of a cluster, reused from trial to trial.

Plain actors, dispatched here; `sweeps.launchers.tune` hands the same trials to Ray Tune.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from sweeps.interrupt import Interrupt
from sweeps.launchers.ray.cluster import admit, cluster, gpus_of, session
from sweeps.launchers.ray.dispatch import Dispatch
from sweeps.launchers.ray.share import Share
from sweeps.launchers.ray.workers import Workers
from sweeps.launchers.serial import RunTrial
from sweeps.trial import Trial, run_trial

NODE_RETRIES = 2


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
            gpus = gpus_of(trials, on_tick, interrupt, say) if gpus_per_trial == "auto" else gpus_per_trial
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


def _workers(share: Share, pool: str) -> Workers:
    """Return the workers, opened on nodes that see the pool: those of the launch before, where they hold the same
    share."""
    own = session()
    if not isinstance(own.held, Workers) or own.held.share != share:
        own.let_go()
        own.held = Workers(share, partial(admit, pool))
    own.held.open()
    return own.held


def _tick(on_tick: Callable[[], None]) -> None:
    """Refresh the live table. Errors: ``RuntimeError`` where Ray has died."""
    session().require()
    on_tick()
