from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_model, build_objective, build_optimizer
from stability.corpora.cache import load
from stability.objectives import training_examples
from stability.runs.directory import read_jsonl
from stability.runs.log import Sinks
from stability.training import run
from stability.training.step import Replica


def rows(directory):
    return list(read_jsonl(directory.gradients_file))


def test_rows_are_those_of_autograd_and_of_the_step_in_float64(lab):
    """Against the gradient of the untrained model and the step that AdamW takes with it, block by block."""
    spec = lab.spec(steps=1, log={"gradients": 1}, clip_norm=1e-2, mechanism={"name": "sc"})
    corpus = load(lab.cache, spec.data_fingerprint)
    model, objective = build_model(spec, corpus.vocab_size), build_objective(spec, corpus.vocab_size)
    examples = training_examples(spec, corpus, objective, "train", 1, seed=0, batch=spec.batch)
    total, count = objective.loss(model, examples)
    (total / count).backward()
    named = {
        name: (parameter.detach().double().clone(), parameter.grad.double().clone())
        for name, parameter in model.named_parameters()
    }
    torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
    build_optimizer(spec, model).step()
    moved = {name: parameter.detach().double() - named[name][0] for name, parameter in model.named_parameters()}
    found = {row["block"]: row for row in rows(lab.train(spec))}
    layer = ("mixer_norm", "mixer", "ffn_norm", "ffn")
    assert set(found) == {"embedding", "final_norm", "head", *(f"blocks.{i}.{part}" for i in (0, 1) for part in layer)}
    whole = sum((gradient**2).sum() for _, gradient in named.values())
    for block, row in found.items():
        inside = [name for name in named if name == block or name.startswith(f"{block}.")]
        gradient = math.sqrt(sum((named[name][1] ** 2).sum() for name in inside))
        weight, step = (
            math.sqrt(sum((values[name] ** 2).sum() for name in inside))
            for values in ({n: v[0] for n, v in named.items()}, moved)
        )
        assert row["grad_norm"] == pytest.approx(gradient, rel=1e-5)
        assert row["grad_share"] == pytest.approx(gradient**2 / whole.item(), rel=1e-5)
        assert row["update_ratio"] == pytest.approx(step / weight, rel=1e-4)
    assert sum(row["grad_share"] for row in found.values()) == pytest.approx(1)


def test_rows_stand_at_every_nth_step_and_agree_with_the_metrics(lab):
    directory = lab.train(lab.spec(log={"gradients": 5}))
    assert sorted({row["step"] for row in rows(directory)}) == [5, 10]
    norms = {row["step"]: row["grad_norm"] for row in read_jsonl(directory.metrics_file)}
    for step in (5, 10):
        assert math.hypot(*(row["grad_norm"] for row in rows(directory) if row["step"] == step)) == pytest.approx(
            norms[step], rel=1e-5
        )


def test_they_change_nothing_of_the_run_they_watch(lab):
    plain, watched = lab.train(lab.spec()), lab.train(lab.spec(log={"gradients": 1}))
    assert plain.metrics_file.read_bytes() == watched.metrics_file.read_bytes()


def test_what_is_not_finite_is_null(lab, monkeypatch):
    real = Replica._backward

    def backward(self, examples, step):
        loss = real(self, examples, step)
        if self.step + 1 == 6:
            self.model.head.weight.grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(Replica, "_backward", backward)
    directory = lab.train(lab.spec(log={"gradients": 3}))
    assert (directory.status()["state"], directory.status()["reason"]) == ("diverged", "grad norm is inf at step 6")
    last = {row["block"]: row for row in rows(directory) if row["step"] == 6}
    assert [block for block, row in last.items() if row["grad_norm"] is None] == ["head"], "it says which block broke"
    assert {row["update_ratio"] for row in last.values()} == {0.0}


def test_the_sinks_get_them_under_the_block_s_name_at_their_step(lab):
    sent = []

    class Collected(Sinks):
        def write(self, row):
            sent.append(row)

    spec = lab.spec(steps=6, log={"gradients": 3}, guards={"on_nonfinite": "skip_step", "retries": 1})
    list(run.train(spec, lab.directory(spec), cache_dir=lab.cache, device="cpu", sinks=Collected(lab.directory(spec))))
    assert [row["step"] for row in sent] == [0, 1, 2, 3, 3, 4, 5, 6, 6], "W&B takes no step that lies behind"
    (row,) = [row for row in rows(lab.directory(spec)) if row["step"] == 3 and row["block"] == "blocks.1.ffn"]
    (logged,) = [row for row in sent if row["step"] == 3 and "loss" not in row]
    assert {name: logged[f"{name}/blocks.1.ffn"] for name in ("grad_norm", "grad_share", "update_ratio")} == {
        k: row[k] for k in list(row)[2:]
    }
    assert sent[-2]["skipped_steps"] == 0


def test_rows_beyond_the_last_checkpoint_are_logged_again_not_twice(lab):
    from stability.training import checkpoint

    spec = lab.spec(log={"gradients": 2})
    directory = lab.train(spec)
    whole = directory.gradients_file.read_bytes()
    directory.status_file.unlink()
    checkpoint.remove(directory.checkpoints()[-1])
    with open(directory.gradients_file, "a") as file:
        file.write('{"step": 13, "bl')
    lab.train(spec)
    assert directory.gradients_file.read_bytes() == whole
