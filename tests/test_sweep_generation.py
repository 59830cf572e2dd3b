"""`generate.num=…` in a sweep: each run is sampled and scored after its training, by either launcher, once."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from stability import sweep
from stability.config.generation import GenerationSpec
from stability.config.run import RunSpec
from stability.probes.generation.generating import steps_of_a_phase
from stability.runs.directory import RunDirectory
from sweeps.costs import FORWARD, generation_steps
from sweeps.launchers import Interrupt
from sweeps.launchers import serial as serial_launcher
from sweeps.progress import Progress
from sweeps.trial import run_trial
from tests.reading import read_spec
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep


@pytest.fixture
def words(lab, small_sweep):
    """A sweep of two rates, and an oracle on the same text."""
    oracle = lab.train(lab.spec(objective={"name": "ar"}))
    own = "mechanism=[sa] lr=[1e-3,1e-2] seeds=1 hessian=false report=false name=small generate.num=3 tables=all"
    return [*small_sweep, *own.split(), f"generate.oracle=ckpt:{oracle.path}"]


def test_a_sweep_samples_and_scores_each_run_once(lab, words, capsys):
    assert sweep.main(words) == 0
    said = capsys.readouterr().out
    assert "trains 2" in said and "Generative NLL against learning rate" in said and "Oracle: ckpt:" in said
    runs = pd.read_parquet(lab.pool / "studies" / "small" / "results" / "runs.parquet")
    assert runs.gen_nll.notna().all() and runs.gen_oracle.str.startswith("ckpt:").all()
    assert sweep.main(words) == 0
    assert "skips 2 finished runs" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"finished samples with num=3 \(asked for: 4\) of its terminal checkpoint \(and 1 more\)"
    ):
        sweep.main([*words, "generate.num=4"])
    assert sweep.main([*words, "generate.num=4", "generate.overwrite=true"]) == 0
    assert "measures samples of 2" in capsys.readouterr().out
    for run_id in runs.run_id:
        assert len(pd.read_parquet(RunDirectory(lab.pool, run_id).generation_file("terminal"))) == 4


def test_a_trained_trial_runs_on_until_its_samples_are_there(tmp_path):
    trial, done = replace(fakes.make_trial(tmp_path), generate={"num": 2}), []
    progress = Progress([trial], is_done=lambda trial: bool(done))
    serial_launcher.launch([trial], interrupt=Interrupt(), run=fakes.run_fake)
    progress.poll()
    assert (progress.rows[0].state, progress.rows[0].phase) == ("running", "samples")
    done.append(True)
    (trial.directory.path / "samples").mkdir()
    progress.poll()
    assert progress.rows[0].state == "stable"


def test_samples_are_in_the_estimated_cost():
    spec = read_spec(
        "sweep", ["data=text", "data.path=x", "objective=mlm", "generate.num=40", "batch=8", "model.positions=16"]
    )
    run: RunSpec = spec.points("f")[0][1]
    assert steps_of_a_phase(run, spec.generate) == 2 * 16
    assert generation_steps(run, spec.generate) == pytest.approx(FORWARD * 2 * 16 * 32 / 8)


def test_a_crash_in_sampling_is_a_failed_run_that_keeps_what_training_gave(lab, words, monkeypatch):
    _, (trial, *_) = make_sweep(lab.pool.parent, pool="other")
    for _ in run_trial(replace(trial, generate={"num": 1, "oracle": "ckpt:/nothing/there"})):
        pass
    status = trial.directory.status()
    assert (
        status["state"] == "failed"
        and "no checkpoint at /nothing/there" in status["reason"]
        and status["result"]["val_nll"] > 0
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["generate.num=0"], "num=0: input should be greater than or equal to 1"),
        (["generate.num=null"], "generate.oracle=ckpt:"),
        (["generate.sampler=euler"], "sampler=euler does not fit objective=mlm"),
        (["generate.oracle=ckpt:/nothing/there"], "no checkpoint at /nothing/there"),
        (["generate.nmu=3"], "generate.nmu: unknown key; did you mean 'generate.num'"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(lab, words, more, message):
    before = set(lab.pool.glob("*/spec.json"))
    with pytest.raises(ValueError) as caught:
        sweep.main([*words, *more])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert set(lab.pool.glob("*/spec.json")) == before


def test_generation_is_no_part_of_a_run_s_identity_and_off_by_default(words):
    without = read_spec("sweep", [word for word in words if not word.startswith("generate.")])
    assert without.generate is None
    assert read_spec("sweep", words).expand("f") == without.expand("f")


def test_an_oracle_s_folder_is_absolute_for_the_workers_and_a_name_stays(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert GenerationSpec(num=1, oracle="ckpt:there").resolve_oracle().oracle == f"ckpt:{tmp_path / 'there'}"
    assert GenerationSpec(num=1, oracle="hf:there").resolve_oracle().oracle == f"hf:{tmp_path / 'there'}"
    assert GenerationSpec(num=1, oracle="hf:gpt2-large").resolve_oracle().oracle == "hf:gpt2-large"


def test_a_plan_asks_for_no_oracle_of_the_hub_but_for_one_on_the_disk(words, capsys):
    assert sweep.main([*words, "generate.oracle=hf:nobody/nothing", "dry_run=true"]) == 0
    assert "kind of run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no checkpoint at /nothing/there"):
        sweep.main([*words, "generate.oracle=ckpt:/nothing/there", "dry_run=true"])
