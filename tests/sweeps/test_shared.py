"""Sweeps that meet on the same runs: each run is trained once, whoever trains it; what is left behind is taken up, or
cleared away."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from stability.cli.subjects import run_locked
from stability.config.launchers import RaySpec, SlurmSpec
from stability.config.parts import part
from stability.runs import lock as lock_module
from stability.runs.lock import Owner, RunLock
from stability.runs.processes import Process
from sweeps import launch, shared
from sweeps.launchers import Interrupt
from sweeps.trial import Trial, mark_failed, run_trial
from tests.sweeps import fakes


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(shared, "POLL_S", 0.01)


class Printed(io.StringIO):
    """What a sweep prints; ``on_wait`` is called once, when the sweep has said that it waits for another one."""

    def __init__(self, on_wait):
        super().__init__()
        self._on_wait = on_wait

    def write(self, text):
        count = super().write(text)
        if self._on_wait is not None and "that another sweep works on" in self.getvalue():
            on_wait, self._on_wait = self._on_wait, None
            on_wait()
        return count


def sweep(trials, *, work=fakes.run_fake, retry="failed", run=None, on_wait=None):
    """Launch the trials serially, locked as real ones are; (outcome, what was printed)."""
    parts = {"objective": part("objectives", "mlm"), "data": part("data", "stdlib")}
    spec = SimpleNamespace(
        launcher="serial",
        sinks=(),
        retry=retry,
        devices_per_trial=1,
        shard_parameters=False,
        device="cpu",
        slurm=SlurmSpec(),
        ray=RaySpec(),
        **parts,
    )
    console = Console(file=Printed(on_wait), force_terminal=False, width=200)
    outcome = launch.run(spec, trials, console=console, run=run or partial(run_trial, work=work))
    return outcome, console.file.getvalue()


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def trained_here(trial):
    return (trial.directory.path / "worker.json").exists()


def sweep_in_a_process(trials, start):
    start.wait()
    sweep(trials, work=fakes.run_counted)


def test_two_sweeps_at_the_same_time_train_each_shared_run_once(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(6)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    sweeps = [
        context.Process(target=sweep_in_a_process, args=(own, start))
        for own in ([*trials[:4], trials[4]], [*trials[:4], trials[5]])
    ]
    for each in sweeps:
        each.start()
    for each in sweeps:
        each.join(60)
    assert [each.exitcode for each in sweeps] == [0, 0]
    assert states(trials) == ["stable"] * 6
    begun = [(trial.directory.path / "begun.txt").read_text().split() for trial in trials]
    assert [len(pids) for pids in begun] == [1] * 6
    assert len({pid for pids in begun for pid in pids}) == 2, "both did something"
    assert not list(tmp_path.glob("*/.*"))


def test_a_run_that_another_sweep_finishes_counts_as_done_and_is_not_trained_here(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]
    other = RunLock(trials[0].directory.path, "another launch")
    assert other.acquire()

    def finish():
        fakes.finish(trials[0].directory, "spiked", step=4, val_nll=2.0)
        other.release()

    outcome, printed = sweep(trials, on_wait=finish)
    assert f"waits for 1 run that another sweep works on ({Process.current()})\n" in printed
    assert (outcome.num_trained, outcome.num_failed, outcome.interrupted) == (2, 0, False)
    assert states(trials) == ["spiked", "stable"]
    assert not trained_here(trials[0])


def test_a_run_whose_holder_dies_is_taken_over(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]
    code = (
        "import sys, time; from stability.runs.lock import RunLock; print(RunLock(sys.argv[1], 'other').acquire(), "
        "flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(trials[0].directory.path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "True\n"
    outcome, printed = sweep(trials, on_wait=holder.kill)
    holder.wait()
    assert f":{holder.pid})" in printed
    assert (outcome.num_trained, states(trials)) == (2, ["stable"] * 2)
    assert trained_here(trials[0])


def test_a_failure_of_another_sweep_is_reported_and_not_tried_again_at_once(tmp_path):
    trial = fakes.make_trial(tmp_path)
    other = RunLock(trial.directory.path)
    assert other.acquire()

    def fail():
        trial.directory.set_status("failed", step=2, reason="ValueError: planted")
        other.release()

    outcome, _ = sweep([trial], on_wait=fail)
    assert [failure.reason for failure in outcome.failures] == ["ValueError: planted"]
    assert not trained_here(trial)


@pytest.mark.parametrize("num_looks", range(1, 6))
def test_it_is_not_tried_again_whenever_the_other_lets_go(tmp_path, monkeypatch, num_looks):
    """The run is free after any number of looks at its lock."""
    trial = fakes.make_trial(tmp_path)
    other, looks = RunLock(trial.directory.path), []
    assert other.acquire()
    look = Trial.find_other_owner

    def held(self):
        looks.append(look(self))
        if len(looks) == num_looks:
            trial.directory.set_status("failed", step=2, reason="ValueError: planted")
            other.release()
        return looks[-1]

    monkeypatch.setattr(Trial, "find_other_owner", held)
    how = {"is_done": lambda trial: False, "on_tick": lambda: None, "say": lambda line: None}
    assert list(shared.hand_out([trial], **how, interrupt=Interrupt())) == []
    assert [owner is None for owner in looks[: num_looks + 1]] == [False] * num_looks + [True]


def test_a_run_that_another_sweep_fails_while_it_waits_its_turn_is_not_tried_again(tmp_path):
    """Both runs are free when they are handed out; the other sweep fails the second one during the first."""
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]

    def work(trial):
        if trial.run_id == trials[0].run_id:
            other = RunLock(trials[1].directory.path, "another")
            assert other.acquire()
            trials[1].directory.set_status("failed", step=2, reason="ValueError: planted")
            other.release()
        yield from fakes.run_fake(trial)

    outcome, _ = sweep(trials, work=work)
    assert [failure.reason for failure in outcome.failures] == ["ValueError: planted"]
    assert trained_here(trials[0]) and not trained_here(trials[1])


def test_a_run_that_had_failed_and_that_another_sweep_gives_back_untouched_is_tried(tmp_path):
    trial = fakes.make_trial(tmp_path)
    trial.directory.set_status("failed", step=2, reason="ValueError: of yesterday")
    other = RunLock(trial.directory.path)
    assert other.acquire()
    outcome, _ = sweep([trial], on_wait=other.release)
    assert (outcome.num_trained, outcome.failures, trained_here(trial)) == (1, (), True)


def test_ctrl_c_ends_the_wait(tmp_path):
    trial = fakes.make_trial(tmp_path)
    other = RunLock(trial.directory.path)
    assert other.acquire()
    outcome, printed = sweep([trial], on_wait=partial(os.kill, os.getpid(), signal.SIGINT))
    other.release()
    assert outcome.interrupted and printed.endswith(f"{launch.HINT}\n")


def test_who_loses_its_lock_stops_and_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.0)
    trial = fakes.make_trial(tmp_path, steps=100)
    steps = run_trial(trial, work=fakes.run_fake)
    next(steps)
    [claim] = trial.directory.path.glob(".lock-*")
    claim.unlink()
    assert list(steps) == []
    assert not (trial.directory.path / "saved.json").exists()
    assert states([trial]) == ["running"]


def test_a_driver_marks_no_run_failed_that_another_sweep_has_taken_over(tmp_path):
    trial = replace(fakes.make_trial(tmp_path), launch="mine")
    other = RunLock(trial.directory.path, "another")
    assert other.acquire()
    mark_failed(trial, "its worker died", "account")
    assert states([trial]) == ["queued"]
    other.release()
    mark_failed(trial, "its worker died", "account")
    assert states([trial]) == ["failed"]
    assert trial.directory.traceback_file.read_text() == "account"


def test_a_worker_that_dies_after_its_verdict_has_not_failed(tmp_path):
    trial = fakes.make_trial(tmp_path)
    fakes.finish(trial.directory, "stable", step=4, val_nll=2.0)
    mark_failed(trial, "its worker died", "account")
    assert states([trial]) == ["stable"]


def test_what_a_kill_left_in_a_finished_run_is_cleared_by_the_next_launch(tmp_path):
    trial = fakes.make_trial(tmp_path)
    sweep([trial])
    gone = replace(Process.current(), started="1")
    (trial.directory.path / ".lock-00.json").write_text(json.dumps(asdict(Owner(gone))))
    (trial.directory.path / ".status.json.00000000-12.tmp").write_text("{")
    half = trial.directory.path / "checkpoints" / ".step_000004.00000000-12.tmp"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    outcome, _ = sweep([trial])
    assert outcome.num_skipped == 1
    assert not list(trial.directory.path.rglob(".*"))


def test_a_trial_that_nobody_works_on_and_that_does_not_end_is_failed_after_two_launches(tmp_path):
    tries = []

    def run(trial):
        tries.append(trial.run_id)
        yield from ()

    outcome, _ = sweep([fakes.make_trial(tmp_path)], run=run)
    assert len(tries) == 2
    assert [failure.reason for failure in outcome.failures] == ["its worker ended without a word"]


def test_retry_none_leaves_failed_runs_and_says_how_many(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    sweep(trials, run=fakes.run_and_fail)
    outcome, printed = sweep(trials, retry="none")
    assert printed.startswith(
        "skips 2 finished runs, leaves 1 failed run (retry=none), trains none\nfailed sa lr=0.01 seed=1"
    )
    assert printed.endswith("retry=failed tries the failed runs again\n")
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed) == (2, 0, 1)
    outcome, _ = sweep(trials)
    assert (outcome.num_trained, outcome.num_failed) == (1, 0)


def test_a_run_is_as_free_for_its_own_launch_as_for_another_once_it_is_left(tmp_path):
    trial = replace(fakes.make_trial(tmp_path, steps=3), launch="mine")
    steps = run_trial(trial, work=fakes.run_fake)
    next(steps)
    assert trial.find_other_owner() is None
    assert replace(trial, launch="other").find_other_owner() is not None
    steps.close()
    assert (trial.directory.path / "saved.json").exists(), "closing the trial saves it"
    assert replace(trial, launch="other").find_other_owner() is None


def test_an_entry_that_measures_leaves_a_run_that_a_sweep_works_on(tmp_path, capsys):
    trial = fakes.make_trial(tmp_path, steps=3)
    other = RunLock(trial.directory.path)
    assert other.acquire()
    assert list(run_locked(trial.directory, fakes.run_fake(trial))) == []
    assert (
        capsys.readouterr().out
        == f"leaves out {trial.run_id}: {Process.current()} works on it; the same command does the rest later\n"
    )
    other.release()
    assert len(list(run_locked(trial.directory, fakes.run_fake(trial)))) == 3
    assert other.owner() is None
