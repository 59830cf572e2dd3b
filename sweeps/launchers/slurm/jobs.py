"""Submit, list and cancel a sweep's jobs.

Jobs run in Slurm or as processes of this machine. `Record` persists them beyond the driver's end.
"""

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
from stability.runs.processes import read_start_time
from sweeps.launchers.slurm.job import RAISED, TrialJob, end_file

LARGEST_ARRAY = 1000  # Slurm's default MaxArraySize is 1001
TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Job:
    """A submitted Slurm job, or a process in its place.

    Attributes:
        job_id: Slurm's id, or a process id.
        started: start of the process, to distinguish it from a later one with the same id.
        asked: the trial's requested measurements (`describe_requests`).
    """

    job_id: str
    started: str
    asked: str


class Record:
    """The unfinished jobs of a sweep by run, in ``<study>/slurm/<executor>.json``.

    With it, a repeated command finds its jobs instead of submitting them again.
    """

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
    """Jobs of Slurm, managed by sbatch, squeue and scancel."""

    def __init__(self, folder: Path, spec: SlurmSpec, threads: int):
        from submitit import SlurmExecutor

        self._folder = folder
        self._executor = SlurmExecutor(folder, max_num_timeout=spec.requeues)
        self._spec, self._cpus = spec, spec.cpus or threads

    def submit(self, callables: Sequence[TrialJob]) -> list[str]:
        """Submit the jobs as arrays, and return their ids.

        Raises:
            RuntimeError: sbatch refuses the jobs; the message quotes sbatch.
        """
        from submitit.core.utils import FailedJobError

        parts = [callables[start : start + LARGEST_ARRAY] for start in range(0, len(callables), LARGEST_ARRAY)]
        self._executor.update_parameters(**self._parameters(max(1, self._spec.max_parallel // len(parts))))
        found: list[str] = []
        for part in parts:
            try:
                with self._executor.batch():
                    jobs = [self._executor.submit(item) for item in part]
            except (FailedJobError, subprocess.CalledProcessError) as error:
                if found:  # cancel the arrays already submitted: they are not on record yet
                    subprocess.run(
                        ["scancel", *sorted({job_id.split("_")[0] for job_id in found})], capture_output=True
                    )
                raise RuntimeError(f"Slurm refuses the jobs: {_last_line(error)}") from None
            found += [job.job_id for job in jobs]
        return found

    def _parameters(self, at_once: int) -> dict[str, Any]:
        """Return submitit's parameters for one array with ``at_once`` concurrent jobs.

        Slurm chooses the parameters that the spec leaves unset.
        """
        spec = self._spec
        values = {
            "job_name": "stability",
            "time": spec.minutes,
            "signal_delay_s": spec.grace_s,
            "cpus_per_task": self._cpus,
            "gpus_per_node": spec.gpus or None,
            "mem": None if spec.mem_gb is None else f"{round(1024 * spec.mem_gb)}M",
            "setup": list(spec.setup) or None,
            "srun_args": [f"--cpus-per-task={self._cpus}"],  # since Slurm 22.05, srun does not inherit it from sbatch
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

    def list_living(self, jobs: Sequence[Job]) -> set[str] | None:
        """Return the ids of waiting, running and ending jobs; None without an answer from Slurm."""
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
    """Jobs as processes of this machine that outlive the driver."""

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
        with _make_children_ignore_signals():
            return [self._start(item) for item in callables]

    def _start(self, item: TrialJob) -> str:
        gpus = self._free_gpus()
        if gpus:
            self._executor.update_parameters(visible_gpus=gpus)  # by default submitit gives every job the first GPUs
        job = self._executor.submit(item)
        self._submitted.append((job, gpus))
        return job.job_id

    def _free_gpus(self) -> tuple[int, ...]:
        taken = {gpu for job, gpus in self._submitted if not job.done() for gpu in gpus}
        free = (gpu for gpu in range(num_gpus() if self._num_gpus else 0) if gpu not in taken)
        return tuple(itertools.islice(free, self._num_gpus))

    def list_living(self, jobs: Sequence[Job]) -> set[str]:
        # done() also reaps ended child processes
        self._submitted = [(job, gpus) for job, gpus in self._submitted if not job.done()]
        return {job.job_id for job in jobs if read_start_time(int(job.job_id)) == job.started}

    def cancel_waiting(self, jobs: Sequence[Job]) -> None:
        """Cancel nothing: the driver submits only jobs that can run at once."""


Queue = SlurmQueue | LocalQueue


@contextmanager
def _make_children_ignore_signals() -> Iterator[None]:
    """Make processes started within the ``with`` block ignore Ctrl-C and the terminal's end.

    Ctrl-C reaches every process of a terminal. Jobs have their own stop file, and must survive the terminal.
    """
    numbers = (signal.SIGINT, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def read_end(folder: Path, job_id: str) -> tuple[str, str] | None:
    """Return (end, traceback) of a job, or None if `TrialJob` wrote none.

    submitit's own result file is a pickle and is never read: anybody with write access to the folder could run code by
    it.
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


def read_log_tail(folder: Path, job_id: str) -> str:
    """Return the last `TAIL_CHARACTERS` of a job's output."""
    from submitit.core.utils import JobPaths

    path = JobPaths(folder, job_id=job_id, task_id=0).stdout
    return path.read_text(errors="replace")[-TAIL_CHARACTERS:] if path.exists() else ""


def forget(folder: Path, job_id: str) -> None:
    """Remove an ended job's files, because a later process may have the same id."""
    for path in folder.glob(f"{job_id}_*"):
        path.unlink(missing_ok=True)


def describe_requests(trial: Any) -> str:
    """Return a trial's curvature and sampling requests as JSON."""
    return json.dumps([trial.curvature, trial.generate], sort_keys=True)


def read_start_time_now(job_id: str, executor: str) -> str:
    return read_start_time(int(job_id)) or "" if executor == "local" else ""


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def cores() -> int:
    return os.cpu_count() or 1


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
