"""`sweeps.launch.run`: what is skipped, what is run again, what is reported."""

import io
import os
import signal

import pytest
from rich.console import Console

from stability.runs import wandb_sink
from stability.runs.directory import RunDirectory
from stability.runs.sink import failure_file
from sweeps import launch
from sweeps import requirements as side_by_side
from sweeps.launchers.slurm import launcher as slurm_launcher
from tests.reading import replaced
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep


class Sweep:
    """A parsed sweep whose trials are run by a fake, and what it printed."""

    def __init__(self, folder, *overrides, count=4):
        self.spec, _ = make_sweep(folder, *overrides)
        self.trials = [
            fakes.make_trial(folder / "pool", index, curvature={} if self.spec.hessian else None)
            for index in range(count)
        ]

    def run(self, run=fakes.run_fake, **more):
        self.console = Console(file=io.StringIO(), force_terminal=False, width=200)
        return launch.run(self.spec, self.trials, console=self.console, run=run, **more)

    @property
    def printed(self):
        return self.console.file.getvalue()


def test_a_finished_run_is_skipped_and_a_failed_one_is_tried_again(tmp_path):
    sweep = Sweep(tmp_path)
    list(fakes.run_fake(sweep.trials[3]))
    outcome = sweep.run(fakes.run_and_fail)
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed, outcome.interrupted) == (1, 2, 1, False)
    assert sweep.printed.startswith("skips 1 finished run, trains 3\n")
    outcome = sweep.run()
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed) == (3, 1, 0)
    outcome = sweep.run(run=None)
    assert (outcome.num_skipped, outcome.num_trained) == (4, 0)
    assert sweep.printed == "skips 4 finished runs, trains none\n"


def test_a_failed_run_is_reported_with_its_reason_and_its_tracebacks_file(tmp_path):
    sweep = Sweep(tmp_path)
    (failure,) = sweep.run(fakes.run_and_fail).failures
    traceback_file = sweep.trials[1].directory.traceback_file
    assert (failure.run_id, failure.reason, failure.traceback_file) == (
        sweep.trials[1].run_id,
        "ValueError: planted",
        str(traceback_file),
    )
    assert sweep.printed.endswith(
        f"failed sa lr=0.01 seed=1 ({failure.run_id}): ValueError: planted\n  traceback: {traceback_file}\nthe same "
        "command tries the failed runs again\n"
    )


def test_runs_that_failed_for_one_reason_are_one_entry_and_of_many_reasons_three_are_printed(tmp_path):
    sweep = Sweep(tmp_path, "name=mine", count=7)
    reasons = ["out of memory", "out of memory", "no such layer", "out of memory", "a", "b", "c"]

    def fail(trial):
        trial.directory.path.mkdir(parents=True, exist_ok=True)
        trial.directory.traceback_file.write_text("Traceback: planted\n")
        trial.directory.set_status("failed", step=0, reason=reasons[trial.spec["seed"]])
        yield

    sweep.run(fail)
    *_, where = (place for place, line in enumerate(sweep.printed.splitlines()) if line.startswith("ended "))
    lines = sweep.printed.splitlines()[where + 1 :]
    assert [line.partition(")")[2] for line in lines[:6:2]] == [" and 2 more: out of memory", ": no such layer", ": a"]
    command = f"python -m stability.status name=mine runs_dir={sweep.spec.runs_dir}"
    assert lines[6:] == [f"2 other reasons: {command}", "the same command tries the failed runs again"]


def test_the_line_that_raised_is_the_users_last_one(tmp_path):
    directory = RunDirectory(tmp_path, "a" * 12)
    assert directory.find_raising_line() == ""
    directory.path.mkdir(parents=True)
    directory.traceback_file.write_text(
        "Traceback (most recent call last):\n"
        '  File "/lab/stability/training/replica.py", line 7, in update\n    loss = self.model(x)\n           ^^^^^^^^^\n'
        '  File "/lab/.venv/lib/python3.11/site-packages/torch/nn/module.py", line 9, in _call\n    return f(x)\n'
        '  File "/home/me/my_package/echo.py", line 31, in forward\n    return self.headz(x)\n'
        '  File "/usr/lib/python3.11/contextlib.py", line 3, in inner\n    return g()\n'
        '  File "<frozen importlib._bootstrap>", line 4, in _load\n'
        "AttributeError: 'Echo' object has no attribute 'headz'\n"
    )
    assert directory.find_raising_line() == "/home/me/my_package/echo.py:31, in forward: return self.headz(x)"


def test_an_interrupted_sweep_says_how_to_go_on_and_goes_on(tmp_path):
    def run(trial):
        for count, _ in enumerate(fakes.run_fake(trial)):
            if trial.spec["seed"] == 1 and count == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield

    sweep = Sweep(tmp_path)
    outcome = sweep.run(run)
    assert outcome.interrupted
    assert outcome.num_trained == 1
    assert sweep.printed.endswith(
        "3 left\ninterrupted: run the same command again, it goes on where this one stopped\n"
    )
    outcome = sweep.run()
    assert (outcome.num_skipped, outcome.num_trained, outcome.interrupted) == (1, 3, False)


def test_a_second_interrupt_still_ends_in_an_outcome(tmp_path):
    def run(trial):
        for _ in fakes.run_fake(trial):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            yield

    sweep = Sweep(tmp_path)
    assert sweep.run(run).interrupted


def test_a_trained_run_without_its_curvature_is_measured_only(tmp_path):
    sweep = Sweep(tmp_path, "hessian=true", count=3)
    for trial in sweep.trials[:2]:
        list(fakes.run_fake(trial))
    measured = {sweep.trials[0].run_id}

    def run(trial):
        if not trial.directory.finished:
            yield from fakes.run_fake(trial)
        measured.add(trial.run_id)
        trial.directory.curvature_file("terminal").parent.mkdir()
        yield

    outcome = sweep.run(run, is_measured=lambda directory, curvature: directory.run_id in measured)
    assert sweep.printed.startswith("skips 1 finished run, trains 1, measures α_max of 1\n")
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed) == (1, 2, 0)


def test_a_run_that_is_listed_twice_is_trained_once(tmp_path):
    sweep = Sweep(tmp_path, count=1)
    sweep.trials *= 3
    assert sweep.run().num_trained == 1


def test_wandb_is_asked_for_once_and_every_trial_carries_the_answer(tmp_path, monkeypatch):
    asked, seen = [], []
    monkeypatch.setattr(wandb_sink, "probe_wandb", lambda: asked.append(1) or ("offline", "W&B: offline"))
    sweep = Sweep(tmp_path, "logger=wandb", "name=my-study", "wandb.project=mine")

    def run(trial):
        seen.append(trial.sinks)
        yield from fakes.run_fake(trial)
        if trial.spec["seed"]:
            failure_file(trial.directory, "wandb").write_text("CommError: planted\n")

    sweep.run(run)
    assert sweep.printed.endswith("W&B failed in 3 of 4 runs, their numbers are in metrics.jsonl: CommError: planted\n")
    assert len(asked) == 1
    assert "W&B: offline\n" in sweep.printed
    assert [values["group"] for values in seen] == ["my-study"] * 4
    assert [values["to"] for values in seen] == [
        {"wandb": {"mode": "offline", "project": "mine", "entity": None, "checkpoints": False}}
    ] * 4
    assert seen[0]["config"]["seed"] == 0


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        (["launcher=serial"], 0, 1),
        (["launcher=ray"], 0, 8),
        (["launcher=ray", "cpus_per_trial=3"], 0, 2),
        (["launcher=ray", "cpus_per_trial=16"], 0, 1),
        (["launcher=ray", "device=auto"], 1, 1),  # one a GPU until their memory is measured
        (["launcher=ray", "device=auto", "gpus_per_trial=0.25"], 1, 4),
        (["launcher=ray", "devices_per_trial=2", "microbatch=1"], 0, 4),
        (["launcher=slurm"], 0, 256),
        (["launcher=slurm", "slurm.executor=local", "slurm.cpus=3"], 0, 2),
        (["launcher=slurm", "slurm.executor=local", "slurm.gpus=2", "devices_per_trial=2", "microbatch=1"], 4, 2),
        (["launcher=ray", "device=auto", "gpus_per_trial=1"], 2, 2),
        (["launcher=ray", "device=cpu"], 1, 8),
    ],
)
def test_slots_are_what_the_cores_and_the_gpus_allow(tmp_path, monkeypatch, overrides, gpus, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(side_by_side, "_num_gpus", lambda: gpus)
    monkeypatch.setattr(slurm_launcher, "num_gpus", lambda: gpus)
    spec, _ = make_sweep(tmp_path, *overrides)
    assert side_by_side.slots(spec) == expected


ONE = ["mechanism=sc", "lr=1e-3"]
TO_SEARCH = ["search.space.lr_peak=null", "search.space.mechanism.sc.step_size={low:0.1,high:2,log:true}"]


@pytest.mark.parametrize(
    ("overrides", "cores", "gpus", "num_done", "expected"),
    [
        (ONE, 8, 0, 0, "serial"),
        ([*ONE, "seeds=2"], 8, 0, 0, "ray"),
        ([], 8, 0, 2, "ray"),
        ([], 8, 0, 3, "serial"),
        ([], 8, 0, 4, "serial"),
        ([], 1, 0, 0, "ray"),  # a run that kills its process must not end the others
        ([*ONE, "threads=8"], 8, 0, 0, "serial"),
        ([*ONE, "threads=9"], 8, 0, 0, "ray"),  # where it is refused
        ([*ONE, "device=auto"], 8, 0, 0, "serial"),
        ([*ONE, "device=auto"], 8, 1, 0, "ray"),
        (ONE, 8, 1, 0, "serial"),  # device=cpu
        ([*ONE, "ray.hang_s=60"], 1, 0, 0, "ray"),
        ([*ONE, "ray.address=127.0.0.1:6379"], 1, 0, 0, "ray"),
        ([*ONE, "cpus_per_trial=1"], 1, 0, 0, "ray"),
        ([*ONE, "gpus_per_trial=0"], 1, 0, 0, "ray"),
        (["search=asha"], 1, 0, 0, "ray"),
        (["search=asha", "search.synchronous=true"], 1, 0, 3, "ray"),
        (["mechanism=sc", "lr=edge"], 8, 0, 9, "ray"),
        ([*ONE, "search=optuna", *TO_SEARCH], 8, 0, 0, "ray"),
        (["launcher=serial"], 8, 0, 0, "serial"),
        (["launcher=ray", *ONE], 1, 0, 0, "ray"),
        (["launcher=slurm", *ONE], 1, 0, 0, "slurm"),
    ],
)
def test_auto_is_serial_where_one_run_of_a_grid_is_missing_on_a_cpu(
    tmp_path, monkeypatch, overrides, cores, gpus, num_done, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(side_by_side, "_num_gpus", lambda: gpus)
    spec, trials = make_sweep(tmp_path, *replaced(["launcher=auto"], *overrides))
    for trial in trials[:num_done]:
        trial.directory.set_status("stable", step=12, num_steps=12)
    assert side_by_side.resolve_launcher(spec, trials).launcher == expected


def test_a_real_sweep_resumes_bit_for_bit_after_an_interrupt(tmp_path):
    spec, trials = make_sweep(tmp_path)
    console = Console(file=io.StringIO(), force_terminal=False)
    steps = iter(range(1000))

    def run(trial):
        for _ in launch.run_trial(trial):
            if next(steps) == 16:  # the second trial's fifth step
                os.kill(os.getpid(), signal.SIGINT)
            yield

    assert launch.run(spec, trials, console=console, run=run).interrupted
    assert (trials[1].directory.status()["state"], trials[1].directory.status()["step"]) == ("interrupted", 5)
    assert launch.run(spec, trials, console=console).num_trained == 3
    other_spec, others = make_sweep(tmp_path, pool="other")
    assert launch.run(other_spec, others, console=console).num_trained == 4
    for trial, other in zip(trials, others, strict=True):
        assert trial.directory.metrics_file.read_bytes() == other.directory.metrics_file.read_bytes()
