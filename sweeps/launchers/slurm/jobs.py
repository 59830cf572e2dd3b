"""Jobs of a sweep as Slurm, or this machine, knows them: submitting, which of them live, what they left; and the record
that outlives the driver."""

from __future__ import annotations

import getpass
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stability.config.launchers import SlurmSpec
from stability.runs.directory import read_json, write_json
from stability.runs.processes import started
from sweeps.launchers.slurm.job import RAISED, TrialJob, end_file

LARGEST_ARRAY = 1000  # Slurm's default MaxArraySize is 1001
TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Job:
    """A job that was submitted to Slurm, or a process in its place. ``job_id``: Slurm's, or a process's id;
    ``started``: tells that process from a later one of the same id;
    ``asked``: what the trial was to give."""

    job_id: str
    started: str
    asked: str


class Record:
    """The record of a sweep's jobs, ``<study>/slurm/jobs.json``: the run of each job that has not ended, so that the
    same command finds it instead of submitting another."""

    def __init__(self, folder: Path, executor: str):
        self._file, self._executor = folder / f"{executor}.json", executor
        self.jobs: dict[str, Job] = {run_id: Job(**values) for run_id, values in self._read().items()}

    def _read(self) -> dict[str, Any]:
        return read_json(self._file) if self._file.exists() else {}

    def add(self, jobs: dict[str, Job]) -> None:
        self.jobs |= jobs
        self._write()

    def drop(self, run_ids: Sequence[str]) -> None:
        self.jobs = {run_id: job for run_id, job in self.jobs.items() if run_id not in run_ids}
        self._write()

    def _write(self) -> None:
        write_json(self._file, {run_id: asdict(job) for run_id, job in self.jobs.items()})


class SlurmQueue:
    """Jobs of Slurm, by sbatch, squeue and scancel."""

    def __init__(self, folder: Path, spec: SlurmSpec, threads: int):
        from submitit import SlurmExecutor

        self._folder = folder
        self._executor = SlurmExecutor(folder, max_num_timeout=spec.requeues)
        self._spec, self._cpus = spec, spec.cpus or threads

    def submit(self, callables: Sequence[TrialJob]) -> list[str]:
        """Submit the jobs as arrays, and return their ids. Errors: ``RuntimeError`` with sbatch's words where it
        refuses."""
        from submitit.core.utils import FailedJobError

        parts = [callables[start : start + LARGEST_ARRAY] for start in range(0, len(callables), LARGEST_ARRAY)]
        self._executor.update_parameters(**self._parameters(max(1, self._spec.max_parallel // len(parts))))
        found: list[str] = []
        for part in parts:
            try:
                with self._executor.batch():
                    jobs = [self._executor.submit(item) for item in part]
            except (FailedJobError, subprocess.CalledProcessError) as error:
                if found:  # of a sweep of several arrays none is left to run that is on no record
                    subprocess.run(
                        ["scancel", *sorted({job_id.split("_")[0] for job_id in found})], capture_output=True
                    )
                raise RuntimeError(f"Slurm refuses the jobs: {_last_line(error)}") from None
            found += [job.job_id for job in jobs]
        return found

    def _parameters(self, at_once: int) -> dict[str, Any]:
        """Return submitit's parameters of one array of jobs, of which ``at_once`` run at a time; what the spec leaves
        open is Slurm's own choice."""
        spec = self._spec
        values = {
            "job_name": "stability",
            "time": spec.minutes,
            "signal_delay_s": spec.grace_s,
            "cpus_per_task": self._cpus,
            "gpus_per_node": spec.gpus or None,
            "mem": None if spec.mem_gb is None else f"{round(1024 * spec.mem_gb)}M",
            "setup": list(spec.setup) or None,
            "srun_args": [f"--cpus-per-task={self._cpus}"],  # which srun stopped taking from sbatch with Slurm 22.05
            "additional_parameters": {"requeue": True},
            "array_parallelism": at_once,
            "stderr_to_stdout": True,
            "wckey": None,
            "partition": spec.partition,
            "account": spec.account,
            "qos": spec.qos,
            "constraint": spec.constraint,
        }
        return {name: value for name, value in values.items() if value is not None or name == "wckey"}

    def living(self, jobs: Sequence[Job]) -> set[str] | None:
        """Return the ids of those that wait, run or end right now; None where Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={getpass.getuser()}"]
        found = subprocess.run(command, capture_output=True, text=True)
        return (
            None
            if found.returncode
            else {line.strip() for line in found.stdout.splitlines()} & {job.job_id for job in jobs}
        )

    def cancel_waiting(self, jobs: Sequence[Job]) -> None:
        arrays = sorted({job.job_id.split("_")[0] for job in jobs})
        subprocess.run(["scancel", "--state=PENDING", *arrays], capture_output=True)


class LocalQueue:
    """Jobs that are processes of this machine, which outlive the driver."""

    def __init__(self, folder: Path, spec: SlurmSpec, threads: int):
        from submitit import LocalExecutor

        self._executor = LocalExecutor(folder, max_num_timeout=spec.requeues)
        self._submitted: list[tuple[Any, tuple[int, ...]]] = []
        self._num_gpus = spec.gpus
        self._executor.update_parameters(
            timeout_min=spec.minutes, signal_delay_s=spec.grace_s, gpus_per_node=spec.gpus, stderr_to_stdout=True
        )
        if spec.setup:
            self._executor.update_parameters(setup=list(spec.setup))

    def submit(self, callables: Sequence[TrialJob]) -> list[str]:
        with _ignored_by_children():
            return [self._start(item) for item in callables]

    def _start(self, item: TrialJob) -> str:
        gpus = self._free_gpus()
        if gpus:
            self._executor.update_parameters(visible_gpus=gpus)  # else submitit gives every job the first ones
        job = self._executor.submit(item)
        self._submitted.append((job, gpus))
        return job.job_id

    def _free_gpus(self) -> tuple[int, ...]:
        taken = {gpu for job, gpus in self._submitted if not job.done() for gpu in gpus}
        free = (gpu for gpu in range(num_gpus() if self._num_gpus else 0) if gpu not in taken)
        return tuple(itertools.islice(free, self._num_gpus))

    def living(self, jobs: Sequence[Job]) -> set[str]:
        # takes leave of those that ended
        self._submitted = [(job, gpus) for job, gpus in self._submitted if not job.done()]
        return {job.job_id for job in jobs if started(int(job.job_id)) == job.started}

    def cancel_waiting(self, jobs: Sequence[Job]) -> None:
        """Cancel nothing, since no job waits: the driver submits no more than run at once."""


Queue = SlurmQueue | LocalQueue


@contextmanager
def _ignored_by_children() -> Iterator[None]:
    """Have the processes started within the ``with`` block ignore Ctrl-C, which reaches every process of a terminal,
    and the terminal's end: jobs are asked to stop in another way, and stay when the terminal goes."""
    numbers = (signal.SIGINT, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def read_end(folder: Path, job_id: str) -> tuple[str, str] | None:
    """Return a job's end, as `TrialJob` wrote it, with the traceback of a job that raised; None if it wrote none.

    submitit's own file of results is a pickle and never read: whoever may write into the folder could run code by it.
    """
    file = end_file(folder, job_id)
    if not file.exists():
        return None
    try:
        found = read_json(file)
        return str(found["end"]), str(found["account"])
    except KeyError as error:
        return RAISED, f"{file} is damaged (no {error})"
    except ValueError as error:
        return RAISED, str(error)


def log_of(folder: Path, job_id: str) -> str:
    """Return the end of what a job printed."""
    from submitit.core.utils import JobPaths

    path = JobPaths(folder, job_id=job_id, task_id=0).stdout
    return path.read_text(errors="replace")[-TAIL_CHARACTERS:] if path.exists() else ""


def forget(folder: Path, job_id: str) -> None:
    """Remove the files of a job that has ended: a process of the same id may come."""
    for path in folder.glob(f"{job_id}_*"):
        path.unlink(missing_ok=True)


def asked_of(trial: Any) -> str:
    """Return what a trial is to give beside its training, as one word."""
    return json.dumps([trial.curvature, trial.generate], sort_keys=True)


def now_started(job_id: str, executor: str) -> str:
    return started(int(job_id)) or "" if executor == "local" else ""


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def cores() -> int:
    return os.cpu_count() or 1


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
