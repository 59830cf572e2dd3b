"""Run trials with Ray Tune, one Tune trial per run.

Tune schedules the runs, retries them after the death of a worker or node, and lists them in Ray's dashboard and its own
result files. The run folders alone record completed work: Tune receives only the missing runs and never restores
anything.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stability.printable import line_of
from stability.runs.processes import Process
from sweeps.launchers import Interrupt, list_driver_variables, set_environment
from sweeps.launchers.ray import cluster as ray_cluster
from sweeps.launchers.ray.cluster import TICK_S, admit, choose_gpus, cluster, import_ray, list_living_nodes, session
from sweeps.launchers.ray.share import Share, require_room
from sweeps.trial import RunTrial, Trial, run_trial

if TYPE_CHECKING:
    from ray import tune

    from sweeps.launchers.ray.asha import Asha
    from sweeps.launchers.ray.board import Board
    from sweeps.launchers.ray.trainable import Job

NODE_RETRIES = 2
SETTLE_S = 10.0  # the last workers end a moment after their Tuner
COPY_S = 60  # between two copies of Tune's own files to their storage path
MORE = 8  # pending trials beyond a cluster's capacity, so that it scales up
SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # our live table is the progress report
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # TensorBoard's writes more than the runs do
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a result between two validations has no NLL
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "60",
    "RAY_TRAIN_COUNT_PREEMPTION_AS_FAILURE": "1",  # a preempted node counts as a dead one, equally for the board
}


class Lost(BaseException):
    """The signal for the loss of Ray.

    It derives from BaseException to bypass Tune: after an `Exception`, Tune cleans up first and would block for
    minutes.
    """


def require(share: Share, address: str | None) -> None:
    """Raise a ``RuntimeError`` if Ray cannot run trials of this share.

    Either Ray is missing, or no cluster answers at ``address``, or, without an address, this machine has too few
    resources.
    """
    with set_environment(SETTINGS | list_driver_variables()):  # read when Ray is imported
        import_ray("ray.tune")
    ray_cluster.require(share, address)


def launch(
    trials: Sequence[Trial],
    *,
    on_tick: Callable[[], None],
    interrupt: Interrupt,
    folder: Path,
    cpus_per_trial: float = 1.0,
    gpus_per_trial: float | Literal["auto"] = 0.0,
    address: str | None = None,
    node_retries: int = NODE_RETRIES,
    hang_s: float | None = None,
    scheduler: Callable[[], Asha] | None = None,
    say: Callable[[str], None] = lambda line: None,
    run: RunTrial = run_trial,
) -> None:
    """Run every trial by a Tuner, each with its share of CPUs and GPUs.

    A trial resumes at its last checkpoint after the death of its worker or node, up to ``node_retries`` times; then it
    is set ``failed``, with Ray's account as traceback. An error of its own is never retried. Once an interrupt is
    requested, current steps end, trials are saved, and this returns. A Ray that was already running is used and left
    running.

    Args:
        trials: the trials.
        on_tick: refreshes the live table.
        interrupt: ends the launch once requested.
        folder: parent of the new folder for Tune's own files.
        cpus_per_trial: CPUs per trial.
        gpus_per_trial: GPUs per trial; "auto": as many trials per GPU as their measured memory allows.
        address: address of a Ray cluster, or None for this machine.
        node_retries: restarts of a trial after the death of its worker or node.
        hang_s: seconds without a step until a worker is killed and its trial resumes; None: never.
        scheduler: creates the scheduler that may stop runs early.
        say: prints a line for the user.
        run: runs one trial; replaced in tests.

    Raises:
        RuntimeError: Ray is missing or dies, a trial needs more resources than exist, or a node does not see the runs'
            folder.
        OSError: not even a failure can be written.
    """
    if not trials:
        return
    with ExitStack() as stack:
        stack.enter_context(set_environment(SETTINGS | list_driver_variables()))
        import_ray("ray.tune")  # while Ray starts
        stack.enter_context(cluster(threads=int(trials[0].spec["threads"]), address=address))
        tick = partial(_tick, on_tick)
        if session().dashboard:
            say(f"Ray's dashboard: http://{session().dashboard}")
            session().dashboard = ""
        if not interrupt.requested:
            gpus = choose_gpus(trials, tick, interrupt, say) if gpus_per_trial == "auto" else gpus_per_trial
        if interrupt.requested:
            return
        admit(trials[0].pool, say)
        share, nodes = Share(cpus_per_trial, gpus), list_living_nodes()
        require_room(share, [node["Resources"] for node in nodes])
        slots = sum(share.fits(node["Resources"]) for node in nodes)
        stack.enter_context(set_environment({"TUNE_MAX_PENDING_TRIALS_PG": str(slots + (MORE if address else 0))}))
        from sweeps.launchers.ray.trainable import Job

        own = folder / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
        own.mkdir(parents=True)
        rules = None if scheduler is None else scheduler()
        milestones = frozenset() if rules is None else frozenset(rules.milestones)
        job = Job({trial.run_id: trial for trial in trials}, run, str(own), Process.current(), milestones)
        _fit(job, share, node_retries, hang_s, rules, tick, interrupt, say)


def _fit(
    job: Job,
    share: Share,
    node_retries: int,
    hang_s: float | None,
    scheduler: Asha | None,
    tick: Callable[[], None],
    interrupt: Interrupt,
    say: Callable[[str], None],
) -> None:
    """Run the job with a Tuner.

    Afterwards, wait up to `SETTLE_S` for workers of runs stopped by ``scheduler``.

    Raises:
        RuntimeError: the Tuner itself fails.
    """
    from ray.tune.error import TuneError

    from sweeps.launchers.ray.board import Board

    settle = (lambda: True) if scheduler is None else scheduler.settle
    board = Board(
        job,
        share,
        node_retries,
        hang_s,
        on_tick=partial(_tick_inside_tuner, tick),
        settle=settle,
        interrupt=interrupt,
        say=say,
    )
    tuner = _tuner(job, share, node_retries, scheduler, board)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    try:
        tuner.fit()
    except Lost as lost:
        raise RuntimeError(str(lost)) from None
    except TuneError as error:  # not a trial's fault, e.g. Tune's disk is full
        reason = line_of(error, -1)
        raise RuntimeError(
            f"Ray Tune ended the sweep ({reason}); the same command goes on where this one stopped"
        ) from None
    deadline = time.monotonic() + SETTLE_S
    while not settle() and time.monotonic() < deadline:
        time.sleep(TICK_S)


def _tuner(job: Job, share: Share, node_retries: int, scheduler: Asha | None, board: Board) -> tune.Tuner:
    """Return a Tuner for the job, with the board as a callback.

    Its files go to the job's folder.
    """
    from ray import tune
    from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback

    from sweeps.launchers.ray.board import Stopping
    from sweeps.launchers.ray.request import request
    from sweeps.launchers.ray.trainable import RUN, RunTrainable

    trainable = tune.with_resources(tune.with_parameters(RunTrainable, job=job), request(share))
    return tune.Tuner(
        trainable,
        param_space={RUN: tune.grid_search([describe(trial) for trial in job.trials.values()])},
        tune_config=tune.TuneConfig(
            reuse_actors=True,
            scheduler=scheduler,
            trial_name_creator=lambda found: found.config[RUN]["id"],
            trial_dirname_creator=lambda found: found.config[RUN]["id"],
        ),
        run_config=tune.RunConfig(
            name=Path(job.folder).name,
            storage_path=str(Path(job.folder).parent),
            sync_config=tune.SyncConfig(sync_period=COPY_S),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run saves itself
            failure_config=tune.FailureConfig(max_failures=node_retries),
            stop=Stopping(board),
            callbacks=[board, CSVLoggerCallback(), JsonLoggerCallback()],
            verbose=0,
        ),
    )


def describe(trial: Trial) -> dict[str, Any]:
    """Return a run's row in Tune's tables: id, label, learning rate, seed."""
    return {"id": trial.run_id, "label": trial.label, "lr": trial.spec["lr_peak"], "seed": trial.spec["seed"]}


def _tick(on_tick: Callable[[], None]) -> None:
    """Refresh the live table; raise a ``RuntimeError`` if Ray has died."""
    session().require()
    on_tick()


def _tick_inside_tuner(tick: Callable[[], None]) -> None:
    """Refresh the live table from within a Tuner; raise `Lost` if Ray has died."""
    try:
        tick()
    except RuntimeError as error:
        raise Lost(str(error)) from None
