"""Run trials as Slurm jobs by submitit, one job per run, in arrays.

Alternatively, jobs are processes of this machine, submitted and polled in the same way.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from stability.config.launchers import SlurmSpec
from sweeps.launchers import Interrupt, list_worker_variables, set_environment
from sweeps.launchers.slurm.job import ENDED, STOPPED, TrialJob
from sweeps.launchers.slurm.jobs import (
    Job,
    LocalQueue,
    Queue,
    Record,
    SlurmQueue,
    cores,
    describe_requests,
    forget,
    num_gpus,
    read_end,
    read_log_tail,
    read_start_time_now,
)
from sweeps.trial import RunTrial, Trial, mark_failed, run_trial

TICK_S = 0.2
COMMANDS = ("srun", "sbatch", "squeue", "scancel")
POLL_S = {"slurm": 5.0, "local": 0.2}  # squeue loads a controller that many users share
ARRIVAL_S = {"slurm": 30.0, "local": 0.0}  # delay until a network file system shows another machine's new files
GRACE_S = 60.0  # wait after Ctrl-C for jobs to end their steps and save; later jobs save without the driver


def launch(
    trials: Sequence[Trial],
    *,
    slurm: SlurmSpec,
    folder: Path,
    on_tick: Callable[[], None],
    interrupt: Interrupt,
    say: Callable[[str], None] = lambda line: None,
    run: RunTrial = run_trial,
) -> None:
    """Submit every trial without a job of an earlier driver, and wait for all.

    Jobs continue if this process dies, and the same command finds them again. Once an interrupt is requested, waiting
    jobs are cancelled; running jobs save and end.

    Args:
        trials: the trials.
        slurm: settings of the jobs.
        folder: folder of job scripts, logs and the jobs' record; every node must see it.
        on_tick: called several times a second.
        interrupt: ends the launch once requested.
        say: prints a line for the user.
        run: runs one trial; replaced in tests.

    Raises:
        RuntimeError: submitit or Slurm is missing, or Slurm refuses the jobs.
    """
    if trials:
        with set_environment(list_worker_variables(int(trials[0].spec["threads"]))):
            _Sweep(trials, slurm, folder, run, say).work(on_tick, interrupt)


def stop(
    trials: Sequence[Trial], *, slurm: SlurmSpec, folder: Path, on_tick: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Cancel the trials' waiting jobs, and let running ones save and end.

    Args:
        trials: the trials; jobs of an earlier driver count too.
        slurm: settings of the jobs.
        folder: folder of the jobs' record.
        on_tick: called several times a second.
        say: prints a line for the user.
    """
    _Sweep(trials, slurm, folder, run_trial, say).stop(on_tick)


def most_at_once(slurm: SlurmSpec, threads: int) -> int:
    """Return the maximum number of concurrent jobs."""
    if slurm.executor == "slurm":
        return slurm.max_parallel
    limits = [slurm.max_parallel, cores() // (slurm.cpus or threads)]
    if slurm.gpus:
        limits.append(num_gpus() // slurm.gpus)
    return max(1, min(limits))


def require(slurm: SlurmSpec) -> None:
    """Raise a ``RuntimeError`` if submitit or a Slurm command is missing.

    Jobs of this machine need no Slurm.
    """
    try:
        importlib.import_module("submitit")
    except ImportError as error:
        raise RuntimeError(
            f"launcher=slurm needs submitit ({error}): pip install submitit, or choose launcher=ray or serial"
        ) from None
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if slurm.executor == "slurm" and missing:
        raise RuntimeError(
            f"launcher=slurm needs Slurm's commands, and there is no {missing[0]} here; slurm.executor=local runs the "
            "jobs here"
        )


class _Sweep:
    """One launch of a sweep: trials awaiting submission, and jobs by run."""

    def __init__(
        self, trials: Sequence[Trial], slurm: SlurmSpec, folder: Path, run: RunTrial, say: Callable[[str], None]
    ):
        require(slurm)
        folder.mkdir(parents=True, exist_ok=True)
        threads = int(trials[0].spec["threads"]) * trials[0].devices
        self._trials = {trial.run_id: trial for trial in trials}
        self._slurm, self._folder, self._run, self._say = slurm, folder, run, say
        self._queue: Queue = (SlurmQueue if slurm.executor == "slurm" else LocalQueue)(folder, slurm, threads)
        self._most = most_at_once(slurm, threads)
        self._stop_file = folder / "stop"
        self._record = Record(folder, slurm.executor)
        self._waiting: deque[str] = deque(self._trials)
        self._ended_at: dict[str, float] = {}
        self._stopped: Counter[str] = Counter()
        self._polled_at = float("-inf")

    def work(self, on_tick: Callable[[], None], interrupt: Interrupt) -> None:
        self._stop_file.unlink(missing_ok=True)
        self._adopt()
        while self._waiting or self._list_own_jobs():
            if interrupt.requested:
                self.stop(on_tick)
                return
            self._submit()
            self._poll()
            on_tick()
            time.sleep(TICK_S)

    def _list_own_jobs(self) -> dict[str, Job]:
        return {run_id: job for run_id, job in self._record.jobs.items() if run_id in self._trials}

    def _adopt(self) -> None:
        """Find the jobs of an earlier driver."""
        self._drop_gone(self._record.jobs, must_answer=True)
        found = self._list_own_jobs()
        self._waiting = deque(run_id for run_id in self._trials if run_id not in found)
        if found:
            self._say(f"found {len(found)} job{'s' if len(found) > 1 else ''} of an earlier start again")

    def _submit(self) -> None:
        room = len(self._waiting) if self._slurm.executor == "slurm" else self._most - len(self._record.jobs)
        run_ids = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not run_ids:
            return
        job_ids = self._queue.submit([TrialJob(self._trials[run_id], self._run, self._stop_file) for run_id in run_ids])
        made = [
            Job(job_id, read_start_time_now(job_id, self._slurm.executor), describe_requests(self._trials[run_id]))
            for run_id, job_id in zip(run_ids, job_ids, strict=True)
        ]
        self._record.add(dict(zip(run_ids, made, strict=True)))

    def _poll(self) -> None:
        """Settle and forget vanished jobs, at most once every `POLL_S`."""
        if time.monotonic() - self._polled_at < POLL_S[self._slurm.executor]:
            return
        self._polled_at = time.monotonic()
        living = self._queue.list_living(list(self._record.jobs.values()))
        if living is None:  # the controller restarts; the jobs continue
            return
        for run_id, job in self._list_own_jobs().items():
            if job.job_id in living:
                self._ended_at.pop(run_id, None)
            elif self._settle(run_id, job):
                forget(self._folder, job.job_id)
                self._record.drop([run_id])
                self._ended_at.pop(run_id, None)

    def _settle(self, run_id: str, job: Job) -> bool:
        """Submit a gone job's run again or set it failed, unless it ended.

        The result is False while the outcome is unknown.
        """
        trial, left = self._trials[run_id], read_end(self._folder, job.job_id)
        if (
            left is None
            and time.monotonic() - self._ended_at.setdefault(run_id, time.monotonic()) < ARRIVAL_S[self._slurm.executor]
        ):
            return False
        end, account = left or ("", "")
        if end == ENDED:
            if job.asked != describe_requests(trial):  # an earlier command requested other measurements
                self._waiting.append(run_id)
        elif end == STOPPED:
            self._resubmit(trial, job)
        else:
            self._fail(trial, job, account)
        return True

    def _resubmit(self, trial: Trial, job: Job) -> None:
        """Submit a saved run again after its job was stopped from outside.

        The run fails after more than ``requeues`` stops.
        """
        if self._stopped[trial.run_id] >= self._slurm.requeues:
            mark_failed(
                trial,
                f"its jobs were stopped {self._stopped[trial.run_id] + 1} times",
                read_log_tail(self._folder, job.job_id),
            )
            return
        self._stopped[trial.run_id] += 1
        self._waiting.append(trial.run_id)
        self._say(f"job {job.job_id} of {trial.label} ({trial.run_id}) was stopped; it is saved and submitted again")

    def _fail(self, trial: Trial, job: Job, account: str) -> None:
        log = read_log_tail(self._folder, job.job_id)
        if account.strip():
            reason = account.strip().splitlines()[-1]
        elif log:
            reason = "its job was killed: by hand, for memory, or with its node"
        else:
            reason = f"its job {job.job_id} left nothing in {self._folder}: does its node see that folder?"
        mark_failed(trial, reason, "\n".join(filter(None, (account, log))) or f"{reason}\n")

    def stop(self, on_tick: Callable[[], None]) -> None:
        """Let the jobs save and end, and wait for them up to `GRACE_S`."""
        self._stop_file.touch()
        self._queue.cancel_waiting(list(self._list_own_jobs().values()))
        deadline, polled_at = time.monotonic() + GRACE_S, float("-inf")
        while (jobs := self._list_own_jobs()) and time.monotonic() < deadline:
            if time.monotonic() - polled_at >= POLL_S[self._slurm.executor]:
                polled_at = time.monotonic()
                self._drop_gone(jobs)
            on_tick()
            time.sleep(TICK_S)
        if jobs := self._list_own_jobs():
            self._say(f"{len(jobs)} jobs are still at a step; they save and end by themselves")

    def _drop_gone(self, jobs: dict[str, Job], must_answer: bool = False) -> None:
        """Forget ended jobs.

        Raises:
            RuntimeError: ``must_answer`` is set and Slurm does not answer.
        """
        living = self._queue.list_living(list(jobs.values())) if jobs else set()
        if living is None and must_answer:
            raise RuntimeError(
                "squeue does not answer, so the jobs of an earlier start are unknown; try again when it does"
            )
        gone = [run_id for run_id, job in jobs.items() if living is not None and job.job_id not in living]
        for run_id in gone:
            forget(self._folder, jobs[run_id].job_id)
        self._record.drop(gone)
