from __future__ import annotations

import json

import pytest
import torch

from stability.build import build_objective
from stability.runs.directory import read_jsonl
from stability.training import checkpoint, run, step


def final_weights(directory):
    return checkpoint.load(directory.checkpoints()[-1])[1].state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_reaches_a_verdict_and_keeps_its_first_and_last_checkpoint(lab):
    directory = lab.train(lab.spec())
    status = directory.status()
    assert status["state"] in ("stable", "plateaued")
    assert [path.name for path in directory.checkpoints()] == ["step_000004", "step_000012"]
    rows = list(read_jsonl(directory.metrics_file))
    assert [row["step"] for row in rows] == list(range(13))
    assert [row["step"] for row in rows if row["val_nll"] is not None] == [0, 4, 8, 12]
    assert status["result"]["val_nll"] == rows[-1]["val_nll"]
    assert status["result"]["num_tokens"] == 12 * 4 * 16


def test_training_lowers_the_loss_below_the_unigram_entropy(lab):
    directory = lab.train(lab.spec(steps=150, lr_peak=1e-2, evaluation={"every_steps": 150, "sequences": 8}))
    result = directory.status()["result"]
    assert result["val_nll"] < result["unigram_nll"] - 0.05 < result["init_nll"]


@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_an_interrupted_run_resumes_bit_for_bit(lab, stop_at):
    spec = lab.spec(mechanism={"name": "sc"})
    straight = lab.train(spec)
    whole, weights = straight.metrics_file.read_bytes(), final_weights(straight)
    trainer = checkpoint.load_trainer(straight.checkpoints()[-1])
    names = [path.name for path in straight.checkpoints()]
    straight.path.rename(lab.pool / "aside")

    resumed = lab.train(spec, steps=stop_at)
    status = resumed.status()
    assert (status["state"], status["step"], status["num_steps"]) == ("interrupted", stop_at, 12)
    assert checkpoint.load_trainer(resumed.checkpoints()[-1])["step"] == stop_at
    lab.train(spec)
    assert resumed.metrics_file.read_bytes() == whole
    assert same(final_weights(resumed), weights)
    assert checkpoint.load_trainer(resumed.checkpoints()[-1])["watch"] == trainer["watch"], (
        "a spike before the interruption is not forgotten"
    )
    assert [path.name for path in resumed.checkpoints()] == names, "what only the interruption wrote is gone"


def test_rows_logged_beyond_the_last_checkpoint_are_logged_again_not_twice(lab):
    spec = lab.spec()
    straight = lab.train(spec)
    whole = straight.metrics_file.read_bytes()
    straight.status_file.unlink()
    # as if killed after step 12 was logged and before its checkpoint stood
    checkpoint.remove(straight.checkpoints()[-1])
    with open(straight.metrics_file, "a") as file:
        file.write('{"step": 13, "lo')
    lab.train(spec)
    assert straight.metrics_file.read_bytes() == whole


def test_a_finished_run_is_not_trained_again(lab):
    spec = lab.spec()
    directory = lab.train(spec)
    before = directory.metrics_file.stat().st_mtime_ns
    assert list(run.train(spec, directory, cache_dir=lab.cache)) == []
    assert directory.metrics_file.stat().st_mtime_ns == before


def test_a_damaged_last_checkpoint_is_passed_over_for_the_one_before(lab, capsys):
    spec = lab.spec()
    straight = lab.train(spec)
    whole = straight.metrics_file.read_bytes()
    straight.status_file.unlink()
    (straight.checkpoints()[-1] / "trainer.pt").write_bytes(b"cut short")
    lab.train(spec)
    assert "damaged checkpoint" in capsys.readouterr().out
    assert straight.metrics_file.read_bytes() == whole


def test_divergence_is_a_result_with_its_reason_and_keeps_the_last_finite_checkpoint(lab, monkeypatch):
    take = step.Replica.train_step

    def poisoned(self, number):
        row = take(self, number)
        return {**row, "loss": float("nan")} if number == 7 else row

    monkeypatch.setattr(step.Replica, "train_step", poisoned)
    directory = lab.train(lab.spec())
    status = directory.status()
    assert (status["state"], status["reason"]) == ("diverged", "loss is nan at step 7")
    assert [path.name for path in directory.checkpoints()] == ["step_000004"]
    assert all(tensor.isfinite().all() for tensor in final_weights(directory).values())
    assert json.loads(directory.metrics_file.read_text().splitlines()[-1])["loss"] is None
    assert status["result"]["val_nll"] is None


def test_an_absurd_learning_rate_is_a_verdict_not_a_crash(lab):
    directory = lab.train(lab.spec(lr_peak=1e30, optimizer={"name": "sgd"}))
    assert directory.status()["state"] == "diverged"


def test_the_gradient_is_clipped_and_logged_before_clipping(lab):
    spec = lab.spec(clip_norm=1e-3, optimizer={"name": "sgd"}, lr_peak=1.0, steps=4)
    rows = [row for row in read_jsonl(lab.train(spec).metrics_file) if row["step"]]
    assert all(row["grad_norm"] > 1e-2 for row in rows)
    assert all(row["update_norm"] == pytest.approx(1e-3, rel=1e-2) for row in rows), (
        "SGD at LR 1 moves by the clipped gradient"
    )


def test_the_first_batch_depends_on_the_seed_and_on_nothing_that_ran_before(lab):
    spec = lab.spec()
    first = list(read_jsonl(lab.train(spec).metrics_file))[1]["loss"]
    torch.manual_seed(123)
    other = list(read_jsonl(lab.train(lab.spec(seed=1)).metrics_file))[1]["loss"]
    assert first != other
    lab.directory(spec).path.rename(lab.pool / "aside")
    assert list(read_jsonl(lab.train(spec).metrics_file))[1]["loss"] == first


def test_validation_is_the_same_for_every_mechanism_and_seed(lab):
    from stability.corpora.cache import load
    from stability.training.evaluate import Validation

    chunks = []
    for changes in ({}, {"mechanism": {"name": "sc"}, "seed": 5, "lr_peak": 0.1}):
        spec = lab.spec(**changes)
        corpus = load(lab.cache, spec.data_fingerprint)
        chunks.append(Validation(spec, corpus, build_objective(spec, corpus.vocab_size), torch.device("cpu"))._chunks)
    assert all(
        torch.equal(a, b) for one, two in zip(*chunks, strict=True) for a, b in zip(one[:3], two[:3], strict=True)
    )


def test_a_checkpoint_of_another_run_is_not_resumed_from(lab, capsys):
    import shutil

    spec = lab.spec()
    straight = lab.train(spec)
    whole = straight.metrics_file.read_bytes()
    foreign = lab.train(lab.spec(seed=1))
    straight.status_file.unlink()
    shutil.rmtree(straight.checkpoints()[-1])
    shutil.copytree(foreign.checkpoints()[-1], straight.path / "checkpoints" / "step_000012")
    lab.train(spec)
    assert "belongs to run" in capsys.readouterr().out
    assert straight.metrics_file.read_bytes() == whole


def test_what_an_interruption_wrote_does_not_outlive_a_run_that_diverges(lab, monkeypatch):
    directory = lab.train(lab.spec(), steps=6)
    assert "step_000006" in [path.name for path in directory.checkpoints()]
    monkeypatch.setattr(step, "first_non_finite", lambda values, step: f"loss is nan at step {step}")
    lab.train(lab.spec())
    assert directory.status()["state"] == "diverged"
    assert [path.name for path in directory.checkpoints()] == ["step_000004"]


def test_a_run_left_in_the_moment_it_diverged_saves_nothing(lab, monkeypatch):
    monkeypatch.setattr(
        step, "first_non_finite", lambda values, step: f"loss is nan at step {step}" if step == 3 else None
    )
    directory = lab.train(lab.spec(), steps=3)
    assert directory.checkpoints() == []
    assert (directory.status()["state"], directory.status()["step"]) == ("interrupted", 0)


def test_the_status_of_a_run_left_in_the_moment_it_diverged_names_the_step_that_it_goes_on_from(lab, monkeypatch):
    monkeypatch.setattr(
        step, "first_non_finite", lambda values, step: f"loss is nan at step {step}" if step == 7 else None
    )
    directory = lab.train(lab.spec(), steps=7)
    assert [path.name for path in directory.checkpoints()] == ["step_000004"]
    assert (directory.status()["state"], directory.status()["step"]) == ("interrupted", 4)
