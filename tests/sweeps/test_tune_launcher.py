"""The launcher that stands on Ray Tune, on one small cluster for all tests of this file."""

import io
import json
import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from sweeps import launch as launching
from sweeps.interrupt import Interrupt
from sweeps.launchers.ray.cluster import cluster as open_cluster
from sweeps.launchers.tune import launcher as tune_launcher
from sweeps.trial import trials_of
from tests.reading import read_spec
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep
from tests.sweeps.searching import Sweep


@pytest.fixture(scope="module")
def cluster():
    with open_cluster(num_cpus=2) as scratch:
        yield scratch


def launch(trials, on_tick=lambda: None, **more):
    with Interrupt() as interrupt:
        tune_launcher.launch(trials, on_tick=on_tick, interrupt=interrupt, **more)
    return interrupt


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def tables(folder):
    """The last row of each of Tune's own tables, by the run's id."""
    return {path.parent.name: json.loads(path.open().readlines()[-1]) for path in folder.glob("*/*/result.json")}


def test_runs_are_byte_for_byte_those_of_serial_and_tunes_own_tables_say_the_same(cluster, tmp_path):
    words = ["lr=1e-2"]
    spec, serial = make_sweep(tmp_path, *words, pool="serial")
    launching.run(spec, serial, console=Console(file=io.StringIO()))
    spec, trials = make_sweep(tmp_path, *words, "launcher=tune", "name=study", pool="tune")
    serial[0].directory.path.rename(trials[0].directory.path)  # finished before Tune is asked
    before = trials[0].directory.metrics_file.stat().st_mtime_ns
    outcome = launching.run(spec, trials, console=Console(file=io.StringIO()))
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed) == (1, 1, 0)
    assert trials[0].directory.metrics_file.stat().st_mtime_ns == before
    for name in ("metrics.jsonl", "spec.json"):
        assert (trials[1].directory.path / name).read_bytes() == (serial[1].directory.path / name).read_bytes()
    rows = tables(tmp_path / "tune/studies/study/tune")
    assert list(rows) == [trials[1].run_id]  # what is finished is never handed to Tune
    status = trials[1].directory.status()
    assert rows[trials[1].run_id]["state"] == status["state"]
    assert rows[trials[1].run_id]["val_nll"] == status["result"]["val_nll"]
    assert trials[1].directory.status()["owner"]["pid"] != os.getpid()


def test_a_run_whose_worker_dies_goes_on_and_one_whose_worker_dies_each_time_fails_alone(cluster, tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=6) for index in range(5)]
    launch(trials, run=fakes.run_and_die_once, folder=tmp_path / "tune")
    assert states(trials) == ["stable"] * 5
    begun = (trials[1].directory.path / "begun.txt").read_text().split()
    assert len(begun) == len(set(begun)) == 2  # another process went on …
    steps = [json.loads(line)["step"] for line in trials[1].directory.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]  # … where the first had stopped
    others = [fakes.make_trial(tmp_path / "others", index) for index in range(3)]
    launch(others, run=fakes.run_and_die, folder=tmp_path / "tune", node_retries=1)
    assert states(others) == ["stable", "failed", "stable"]
    assert others[1].directory.status()["reason"].startswith("its worker process died 2 times")
    assert "The actor" in others[1].directory.traceback_file.read_text()


def test_an_interrupt_saves_what_runs_and_starts_nothing_more(cluster, tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=200) for index in range(5)]
    interrupted = []

    def interrupt_once():
        if all(trial.directory.metrics_file.exists() for trial in trials[:2]) and not interrupted:
            interrupted.append(os.kill(os.getpid(), signal.SIGINT))

    assert launch(trials, on_tick=interrupt_once, run=fakes.run_slowly, folder=tmp_path / "tune").requested
    assert states(trials) == ["interrupted"] * 2 + ["queued"] * 3
    saved = [json.loads((trial.directory.path / "saved.json").read_text()) for trial in trials[:2]]
    assert all(0 < step < 200 for step in saved)
    launch(trials[:2], run=fakes.run_fake, folder=tmp_path / "tune")
    assert states(trials[:2]) == ["stable"] * 2
    assert [len(trial.directory.metrics_file.read_text().splitlines()) for trial in trials[:2]] == [200, 200]


ASHA = ("launcher=tune", "search=asha", "lr=[1e-3,3e-3,1e-2,3e-2,1e-1,3e-1]", "steps=18", "evaluation.every_steps=1")


def test_asha_stops_and_marks_what_is_not_among_the_best_and_another_sweep_goes_on_with_it(cluster, tmp_path):
    sweep = Sweep(tmp_path, *ASHA, "name=asha")
    outcome = sweep.run(fakes.run_valley)
    runs = [trial.directory for trial in trials_of(sweep.spec, sweep.spec.points("f" * 64))]
    statuses = {run.run_id: run.status() for run in runs}
    stopped = {run_id: status for run_id, status in statuses.items() if status["state"] == "stopped"}
    assert outcome.num_failed == 0 and outcome.num_trained == 12 and 2 <= len(stopped) <= 10
    assert {status["by"] for status in stopped.values()} == {"asha 3 at 2 6"}
    assert {status["step"] for status in stopped.values()} <= {2, 6}
    assert all(status["state"] == "stable" for run_id, status in statuses.items() if run_id not in stopped)
    best = {run.run_id for run in runs if json.loads(run.spec_file.read_text())["lr_peak"] == 3e-3}
    assert len(best) == 2 and not best & stopped.keys()  # the best goes on, whatever came before it
    assert sweep.study.read()["stopped"] == {run_id: status["reason"] for run_id, status in stopped.items()}
    again = Sweep(tmp_path, *ASHA, "name=asha")
    assert (again.run(fakes.run_valley).num_trained, again.study.read()) == (0, sweep.study.read())
    spec = read_spec("sweep", [*(word for word in sweep.words if word not in ASHA[:2]), "launcher=serial"])
    trials = trials_of(spec, spec.points("f" * 64))
    assert launching.run(spec, trials, console=Console(file=io.StringIO()), run=fakes.run_valley).num_trained == len(
        stopped
    )
    assert states(trials) == ["stable"] * 12


def test_asha_begun_again_knows_the_rungs_that_the_ledger_holds(tmp_path):
    from sweeps.launchers.tune.asha import Asha

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


@pytest.mark.parametrize(
    ("share", "text"),
    [
        ({"cpus_per_trial": 3}, "cpus_per_trial=3, but there are 2 CPUs; give at most 2"),
        ({"gpus_per_trial": 0.5}, "gpus_per_trial=0.5, but there is no GPU; give gpus_per_trial=0 or auto"),
    ],
)
def test_a_trial_that_asks_for_more_than_there_is_is_refused(cluster, tmp_path, share, text):
    with pytest.raises(RuntimeError, match=text):
        launch([fakes.make_trial(tmp_path)], folder=tmp_path / "tune", **share)
