"""The Slurm launcher with submitit's local executor: real jobs in processes of their own, without Slurm."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability.config.launchers import SlurmSpec
from sweeps.launchers import Interrupt
from sweeps.launchers.slurm import jobs as slurm_jobs
from sweeps.launchers.slurm import launcher as slurm_launcher
from tests.sweeps import fakes

LOCAL = SlurmSpec(executor="local", max_parallel=2, cpus=1)


def launch(trials, folder, on_tick=lambda: None, slurm=LOCAL, **more):
    with Interrupt() as interrupt:
        slurm_launcher.launch(trials, slurm=slurm, folder=folder, on_tick=on_tick, interrupt=interrupt, **more)
    return interrupt


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def worker_of(trial):
    return json.loads((trial.directory.path / "worker.json").read_text())


def recorded(folder):
    file = folder / "local.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_every_trial_is_a_job_of_its_own_and_nothing_is_left_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_launcher, "cores", lambda: 2)
    trials, running = [fakes.make_trial(tmp_path, index) for index in range(3)], []
    launch(
        trials,
        tmp_path / "slurm",
        on_tick=lambda: running.append(len(recorded(tmp_path / "slurm"))),
        run=fakes.run_fake,
    )
    assert states(trials) == ["stable"] * 3
    workers = [worker_of(trial) for trial in trials]
    assert len({worker["pid"] for worker in workers} | {os.getpid()}) == 4
    assert {worker["omp"] for worker in workers} == {"1"}
    assert max(running) == 2
    assert recorded(tmp_path / "slurm") == {}
    assert [path.name for path in (tmp_path / "slurm").iterdir()] == ["local.json"]


def test_a_killed_job_fails_its_own_trial_only_and_a_job_that_raises_keeps_its_traceback(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    launch(trials, tmp_path / "slurm", run=run_die_or_raise)
    assert states(trials) == ["stable", "failed", "failed"]
    assert trials[1].directory.status()["reason"] == "its job was killed: by hand, for memory, or with its node"
    assert trials[2].directory.status()["reason"] == "OSError: planted"
    assert "in run_die_or_raise" in trials[2].directory.traceback_file.read_text()


def run_die_or_raise(trial):
    if trial.spec["seed"] == 2:
        raise OSError("planted")
    yield from fakes.run_and_die(trial)


class Planted:
    """A pickle that makes a file of what reads it."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("written", ["nothing", "nothing that can be read"])
def test_a_pickle_that_lies_where_submitit_leaves_a_jobs_result_is_not_read(tmp_path, monkeypatch, written):
    monkeypatch.setitem(slurm_launcher.POLL_S, "local", 0.0)
    trial, folder, mark = fakes.make_trial(tmp_path), tmp_path / "slurm", tmp_path / "mark"
    folder.mkdir()
    slurm_jobs.Record(folder, "local").add(
        {trial.run_id: slurm_jobs.Job("999999999", "", slurm_jobs.describe_requests(trial))}
    )
    (folder / "999999999_0_result.pkl").write_bytes(pickle.dumps(("success", Planted(mark))))
    if written != "nothing":
        (folder / "999999999_end.json").write_text('{"end": ')
    sweep = slurm_launcher._Sweep([trial], LOCAL, folder, fakes.run_fake, lambda line: None)
    for _ in range(2):  # the first notes that the job is gone
        sweep._poll()
    assert not mark.exists()
    assert trial.directory.status()["state"] == "failed"
    assert recorded(folder) == {} and [path.name for path in folder.iterdir()] == ["local.json"]


def test_an_interrupt_saves_what_runs_and_submits_nothing_more(tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=60) for index in range(3)]
    on_tick = fakes.interrupt_once(trials[:2])
    assert launch(trials, tmp_path / "slurm", on_tick=on_tick, run=fakes.run_slowly).requested
    assert states(trials) == ["interrupted", "interrupted", "queued"]
    assert all(0 < json.loads((trial.directory.path / "saved.json").read_text()) < 60 for trial in trials[:2])
    assert recorded(tmp_path / "slurm") == {}


DRIVER = """
import sys
from pathlib import Path
from tests.sweeps import fakes
from tests.sweeps.test_slurm_launcher import launch
folder = Path(sys.argv[1])
launch([fakes.make_trial(folder, index, steps=20) for index in range(2)], folder / "slurm", run=fakes.run_slowly)
"""


def test_after_a_kill_of_the_driver_the_same_command_finds_its_jobs_again(tmp_path):
    trials, said = [fakes.make_trial(tmp_path, index, steps=20) for index in range(2)], []
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=Path(__file__).resolve().parents[2])
    deadline = time.monotonic() + 60
    while not all(trial.directory.metrics_file.exists() for trial in trials) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    before = [worker_of(trial)["pid"] for trial in trials]
    launch(trials, tmp_path / "slurm", run=fakes.run_slowly, say=said.append)
    assert said == ["found 2 jobs of an earlier start again"]
    assert states(trials) == ["stable"] * 2
    assert [worker_of(trial)["pid"] for trial in trials] == before
    assert [len(trial.directory.metrics_file.read_text().splitlines()) for trial in trials] == [20, 20]


def signalled(number, pids):
    """A trial of 30 steps whose process gets a signal from itself at its tenth, the first time."""

    def run(trial):
        for count, _ in enumerate(fakes.run_fake(trial), 1):
            pids.write_text(f"{pids.read_text() if pids.exists() else ''}{os.getpid()} ") if count == 1 else None
            if count == 10 and len(pids.read_text().split()) == 1:
                os.kill(os.getpid(), number)
            yield

    return run


STOPPED = [pytest.param(signal.SIGTERM, ["was stopped; it is saved and submitted again"], marks=pytest.mark.slow)]


@pytest.mark.parametrize(("number", "said"), [(signal.SIGUSR2, []), *STOPPED])
def test_a_preempted_or_stopped_job_is_saved_and_goes_on_in_another_process(tmp_path, number, said):
    trial, lines = fakes.make_trial(tmp_path, steps=30), []
    launch([trial], tmp_path / "slurm", run=signalled(number, tmp_path / "pids"), say=lines.append)
    assert states([trial]) == ["stable"]
    assert len(set((tmp_path / "pids").read_text().split())) == 2
    assert json.loads((trial.directory.path / "saved.json").read_text()) == 10
    assert [json.loads(line)["step"] for line in trial.directory.metrics_file.read_text().splitlines()] == list(
        range(1, 31)
    )
    assert [line.partition(") ")[2] for line in lines] == said


@pytest.mark.slow
def test_a_job_that_is_stopped_too_often_fails_its_run(tmp_path):
    trial = fakes.make_trial(tmp_path, steps=3)
    launch([trial], tmp_path / "slurm", run=stop_always, slurm=LOCAL.model_copy(update={"requeues": 1}))
    assert trial.directory.status()["reason"] == "its jobs were stopped 2 times"


def stop_always(trial):
    for _ in fakes.run_fake(trial):
        os.kill(os.getpid(), signal.SIGTERM)
        yield


def test_without_submitit_or_slurm_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RuntimeError,
        match="launcher=slurm needs Slurm's commands, and there is no srun here; slurm.executor=local runs the jobs "
        "here",
    ):
        launch([fakes.make_trial(tmp_path)], tmp_path, slurm=SlurmSpec())
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(
        RuntimeError, match="launcher=slurm needs submitit .*: pip install submitit, or choose launcher=ray or serial"
    ):
        launch([fakes.make_trial(tmp_path)], tmp_path)


def test_what_slurm_is_asked_for_is_what_the_settings_say(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tools))
    spec = SlurmSpec(
        partition="long",
        account="lab",
        minutes=90,
        grace_s=120,
        gpus=2,
        mem_gb=1.5,
        max_parallel=7,
        setup=("module load cuda",),
    )
    queue = slurm_jobs.SlurmQueue(tmp_path, spec, threads=3)
    queue._executor.update_parameters(**queue._parameters(spec.max_parallel))
    script = queue._executor._make_submission_file_text("python job", "uid")
    lines = (
        "partition=long",
        "account=lab",
        "time=90",
        "signal=USR2@120",
        "gpus-per-node=2",
        "mem=1536M",
        "cpus-per-task=3",
        "requeue",
    )
    assert {f"#SBATCH --{line}" for line in lines} <= set(script.splitlines())
    assert "module load cuda" in script.splitlines()
    assert [line for line in script.splitlines() if line.startswith("srun ") and "--cpus-per-task=3" in line]
    assert not [line for line in script.splitlines() if "qos" in line or "constraint" in line or "wckey" in line]
