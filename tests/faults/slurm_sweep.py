"""A sweep on Slurm (`one_node_slurm.sh start` sets one up here), disturbed in every way that a cluster knows; its
numbers are a serial sweep's.

    python -m tests.faults.slurm_sweep [FOLDER]

One job is preempted (SIGUSR2, as before its time limit), one is cancelled by hand, the driver is killed and the same
command finds its jobs again.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sweeps import launch
from sweeps.trial import Trial
from tests.sweeps.real import make_sweep

SWEEP = ("steps=1500", "evaluation.every_steps=500", "checkpoint.every_steps=250", "seeds=1", "name=on-slurm")
SLURM = ("launcher=slurm", "slurm.minutes=10", "slurm.grace_s=30")


def drive(folder: Path) -> None:
    """What the user's command does; killed and started again by `main`."""
    spec, trials = make_sweep(folder, *SWEEP, *SLURM, pool="slurm")
    outcome = launch.run(spec, trials, console=Console(file=sys.stdout, force_terminal=False, width=160))
    sys.exit(130 if outcome.interrupted else outcome.num_failed)


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.faults.slurm_sweep", "--drive", str(folder)])


def job_ids() -> list[str]:
    listed = subprocess.run(
        ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"],
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split()


def restarts_of(job: str) -> int:
    """How often Slurm has queued a job again."""
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return int(shown.partition("Restarts=")[2].split()[0])


def wait_until(is_so: Callable[[], bool], complaint: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, complaint
        time.sleep(0.2)


def wait_for_step(trials: list[Trial], step: int) -> None:
    """Until two runs are beyond a step and not at their end."""
    while True:
        lines = [
            trial.directory.metrics_file.read_bytes().count(b"\n")
            for trial in trials
            if trial.directory.status()["state"] == "running"
        ]
        if sum(count > step for count in lines) >= 2:
            return
        assert not all(trial.directory.finished for trial in trials), "the runs are too short to be disturbed"
        time.sleep(0.1)


def main(folder: Path) -> None:
    spec, undisturbed = make_sweep(folder, *SWEEP, pool="undisturbed")
    launch.run(spec, undisturbed, console=Console(file=io.StringIO()))
    _, trials = make_sweep(folder, *SWEEP, *SLURM, pool="slurm")
    driver = start(folder)
    wait_for_step(trials, 60)
    preempted, stopped, *_ = job_ids()
    print(f"preempts job {preempted}, cancels job {stopped}", flush=True)
    # scancel repeats a signal until the job can take none any more, and then complains: by that time it is queued
    # again, which is what was asked for
    preempting = subprocess.Popen(["scancel", "--signal=USR2", preempted], stderr=subprocess.DEVNULL)
    subprocess.run(["scancel", stopped], check=True)
    wait_until(lambda: restarts_of(preempted) > 0, "the preempted job was not queued again")
    preempting.kill()
    preempting.wait()
    wait_for_step(trials, 300)
    before = set(job_ids())
    print(f"kills the driver while jobs {sorted(before)} run, and starts it again", flush=True)
    driver.kill()
    driver.wait()
    driver = start(folder)
    time.sleep(10)
    assert before & set(job_ids()) or all(trial.directory.finished for trial in trials), (
        "the jobs ended with the driver"
    )
    driver.send_signal(signal.SIGINT)
    assert driver.wait(120) in (0, 130)
    assert not job_ids(), "jobs run on after Ctrl-C"
    print("interrupted; starts the same command again", flush=True)
    assert start(folder).wait() == 0
    for one, other in zip(undisturbed, trials, strict=True):
        assert one.directory.metrics_file.read_bytes() == other.directory.metrics_file.read_bytes(), one.label
    print(
        f"{len(trials)} runs on Slurm, preempted, cancelled, driver killed, interrupted: metrics.jsonl byte for byte "
        "the undisturbed ones"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["--drive"]:
        drive(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=Path.home()) as name:  # Slurm's daemons may have a /tmp of their own
            main(Path(name))
