"""`search=asha`, by Ray Tune's scheduler over the ledger, on one small cluster for all tests of this file."""

import io
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from stability.runs.processes import Process
from sweeps import launch as launching
from sweeps.launchers.ray.cluster import cluster as open_cluster
from sweeps.trial import is_done, make_trials, mark_stopped
from tests.reading import read_spec
from tests.sweeps import fakes
from tests.sweeps.searching import Sweep
from tests.sweeps.tune_tables import assert_agrees


@pytest.fixture(scope="module")
def cluster():
    with open_cluster(num_cpus=2) as scratch:
        yield scratch


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


ASHA = ("launcher=ray", "search=asha", "lr=[1e-3,3e-3,1e-2,3e-2,1e-1,3e-1]", "steps=18", "evaluation.every_steps=1")


@pytest.mark.slow  # its rules are kept below, Ray's workers in test_ray_launcher.py
def test_asha_stops_and_marks_what_is_not_among_the_best_and_another_sweep_goes_on_with_it(cluster, tmp_path):
    sweep = Sweep(tmp_path, *ASHA, "name=asha")
    outcome = sweep.run(fakes.run_valley)
    runs = [trial.directory for trial in make_trials(sweep.spec, sweep.spec.points("f" * 64))]
    statuses = {run.run_id: run.status() for run in runs}
    stopped = {run_id: status for run_id, status in statuses.items() if status["state"] == "stopped"}
    assert outcome.num_failed == 0 and outcome.num_trained == 12 and 2 <= len(stopped) <= 10
    assert {status["by"] for status in stopped.values()} == {"asha 3 at 2 6"}
    assert {status["step"] for status in stopped.values()} <= {2, 6}
    assert all(status["state"] == "stable" for run_id, status in statuses.items() if run_id not in stopped)
    best = {run.run_id for run in runs if json.loads(run.spec_file.read_text())["lr_peak"] == 3e-3}
    assert len(best) == 2 and not best & stopped.keys()  # the best goes on, whatever came before it
    assert sweep.study.read()["stopped"] == {run_id: status["reason"] for run_id, status in stopped.items()}
    assert_agrees(launching.folder_of(sweep.spec), runs)
    again = Sweep(tmp_path, *ASHA, "name=asha")
    assert (again.run(fakes.run_valley).num_trained, again.study.read()) == (0, sweep.study.read())
    spec = read_spec("sweep", [*(word for word in sweep.words if word not in ASHA[:2]), "launcher=serial"])
    trials = make_trials(spec, spec.points("f" * 64))
    rest = partial(fakes.run_valley, step_s=0.0)
    assert launching.run(spec, trials, console=Console(file=io.StringIO()), run=rest).num_trained == len(stopped)
    assert states(trials) == ["stable"] * 12


def gone_back_at_five(trial):
    """Steps of which a guard takes two back after the fifth, as `guards.on_nonfinite=restore_last_good` does."""
    for step in (1, 2, 3, 4, 5, 4, 5, 6, 7, 8):
        fakes.log_step(trial.directory, step, wall_s=0.1, val_nll=2.0)
        yield
    fakes.finish(trial.directory, "stable", step=8, val_nll=2.0)


def test_a_run_that_went_back_some_steps_is_compared_at_its_rungs_all_the_same(tmp_path):
    worker = fakes.worker(fakes.make_trial(tmp_path, steps=8), gone_back_at_five, tmp_path, Process.current())
    worker._job = replace(worker._job, milestones=frozenset({2, 6}))
    told = [worker.step()]
    while not told[-1]["done"]:
        told.append(worker.step())
    assert [result["step"] for result in told] == [2, 6, 8]


@pytest.mark.parametrize(("state", "step"), [("running", 3), ("interrupted", 5)])
def test_a_run_whose_worker_was_killed_while_it_saved_is_stopped_at_its_last_checkpoint(tmp_path, state, step):
    trial = replace(fakes.make_trial(tmp_path, steps=18), stopped_by="asha 3 at 2 6")
    (trial.directory.path / "checkpoints/step_000003").mkdir(parents=True)
    trial.directory.set_status(state, step=0 if state == "running" else 5, num_steps=18)
    assert mark_stopped(trial, "why")
    status = trial.directory.status()
    assert (status["state"], status["step"], status["by"]) == ("stopped", step, "asha 3 at 2 6")
    assert is_done(trial) and not is_done(replace(trial, stopped_by=""))


@pytest.mark.parametrize("state", ["queued", "stable", "diverged", "failed"])
def test_a_run_that_has_ended_meanwhile_is_not_stopped(tmp_path, state):
    trial = fakes.make_trial(tmp_path)
    trial.directory.set_status(state, step=4, num_steps=4)
    assert mark_stopped(trial, "why") and trial.directory.status()["state"] == state


def test_asha_begun_again_knows_the_rungs_that_the_ledger_holds(tmp_path):
    Asha = fakes.imported("sweeps.launchers.ray.asha").Asha
    trials = [fakes.make_trial(tmp_path, index, seed=0, lr_peak=0.1 * index, steps=18) for index in range(1, 5)]
    for trial, nll in zip(trials, (2.0, 2.1, 3.0, None), strict=True):
        fakes.log_step(trial.directory, 2, wall_s=0.1, val_nll=nll)
    trials[3].directory.set_status("diverged", step=2, num_steps=18)
    fresh = fakes.make_trial(tmp_path, 9, seed=0, lr_peak=0.9, steps=18)
    for nll, decision in ((2.15, "STOP"), (2.08, "CONTINUE")):  # 2.067 were the limit without the divergence
        rules = Asha([*trials, fresh], (2, 6), 3)
        newcomer = SimpleNamespace(config={"run": {"id": fresh.run_id}})
        assert rules.on_trial_result(None, newcomer, {"step": 2, "val_nll": nll}) == decision
        assert rules.on_trial_result(None, newcomer, {"step": 3, "val_nll": 9.0}) == "CONTINUE"
