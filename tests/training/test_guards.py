"""Guards against runs trained by hand, and against interruptions."""

from __future__ import annotations

import shutil

import pytest
import torch

from stability.build import build_model, build_objective, build_optimizer
from stability.corpora.cache import load
from stability.objectives import training_examples
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training import checkpoint, run
from stability.training.step import Replica
from tests.within import assert_within

NAN = float("nan")
SKIP = {"on_nonfinite": "skip_step", "retries": 9}
RESTORE = {"on_nonfinite": "restore_last_good", "retries": 9}


@pytest.fixture
def poison(monkeypatch):
    """Loss and gradient of these steps are NaN, whatever the parameters."""

    def at(*steps: int) -> None:
        real = Replica._backward

        def backward(self, examples, step):
            loss = real(self, examples, step)
            if self.step + 1 not in steps:
                return loss
            for parameter in self.parameters:
                parameter.grad.fill_(NAN)
            return [part * NAN for part in loss]

        monkeypatch.setattr(Replica, "_backward", backward)

    return at


def by_hand(lab, spec, steps, start=None):
    """The weights after plain steps of those numbers, each with its own batch, clipped by the formula, from the
    initialisation or a checkpoint."""
    corpus = load(lab.cache, spec.data_fingerprint)
    objective, model = build_objective(spec, corpus.vocab_size), build_model(spec, corpus.vocab_size)
    optimizer = build_optimizer(spec, model)
    if start is not None:
        model.load_state_dict(checkpoint.load(start)[1].state_dict())
        optimizer.load_state_dict(checkpoint.load_trainer(start)["optimizer"])
    for step in steps:
        optimizer.param_groups[0]["lr"] = spec.lr_peak * (0.1 + 0.9 * (1 - (step - 1) / spec.steps))  # schedule: linear
        examples = training_examples(spec, corpus, objective, "train", step, seed=spec.seed, batch=spec.batch)
        total, count = objective.loss(model, examples)
        gradients = torch.autograd.grad(total / count, list(model.parameters()))
        norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient * min(1.0, spec.clip_norm / (norm.item() + 1e-6))
        optimizer.step()
    return model.state_dict()


def weights(directory: RunDirectory):
    return checkpoint.load(directory.checkpoints()[-1])[1].state_dict()


def largest_difference(a, b) -> float:
    return max((a[key] - b[key]).abs().max().item() for key in a)


def rows(directory: RunDirectory):
    return {row["step"]: row for row in read_jsonl(directory.metrics_file)}


# SGD: AdamW divides by √v, so that where a gradient nearly cancels its rounding alone would move an entry by 5e-6
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "lr_peak": 0.3}
LINEAR = {"schedule": {"name": "linear", "final_ratio": 0.1}, **SGD}


def test_a_skipped_step_leaves_its_batch_out_and_nothing_else(lab, poison):
    spec = lab.spec(guards=SKIP, **LINEAR)
    poison(5, 8)
    directory = lab.train(spec)
    without = by_hand(lab, spec, [1, 2, 3, 4, 6, 7, 9, 10, 11, 12])
    assert_within(largest_difference(weights(directory), without), 1e-5)
    assert largest_difference(without, by_hand(lab, spec, range(1, 13))) > 1e-3, "the comparison can tell"
    result = directory.status()["result"]
    assert (result["skipped_steps"], result["restores"]) == (2, 0)
    logged = rows(directory)
    assert [step for step, row in logged.items() if row["loss"] is None and step] == [5, 8]
    assert logged[5]["update_norm"] == logged[8]["update_norm"] == 0.0
    assert [logged[step]["skipped_steps"] for step in (4, 5, 7, 8, 12)] == [0, 1, 1, 2, 2]
    assert logged[8]["val_nll"] == pytest.approx(logged[12]["val_nll"], rel=0.5), (
        "a step that is left out is validated all the same"
    )


def test_a_restore_goes_on_from_the_checkpoint_with_the_batches_that_come_next(lab, poison):
    spec = lab.spec(guards=RESTORE, **LINEAR)
    poison(7)
    directory = lab.train(spec)
    first, last = directory.checkpoints()
    assert (first.name, last.name) == ("step_000004", "step_000012")
    again = by_hand(lab, spec, [8, 9, 10, 11, 12], start=first)
    assert_within(largest_difference(weights(directory), again), 1e-5)
    assert largest_difference(again, by_hand(lab, spec, [7, 8, 9, 10, 11], start=first)) > 1e-3, (
        "other batches and rates"
    )
    assert largest_difference(again, by_hand(lab, spec, [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12])) > 1e-3, (
        "not a skipped step"
    )
    assert directory.status()["result"]["restores"] == 1
    assert {step: row["restored_step"] for step, row in rows(directory).items() if "restored_step" in row} == {7: 4}


def test_before_the_first_checkpoint_the_initialisation_comes_back(lab, poison):
    spec = lab.spec(guards=RESTORE, **LINEAR)
    poison(3)
    directory = lab.train(spec)
    assert_within(largest_difference(weights(directory), by_hand(lab, spec, range(4, 13))), 1e-5)
    assert rows(directory)[3]["restored_step"] == 0


def test_a_restore_on_the_last_step_ends_with_the_checkpoint_and_its_nll(lab, poison):
    poison(12)
    directory = lab.train(lab.spec(guards=RESTORE, checkpoint={"every_steps": 8}))
    eight, twelve = (checkpoint.load(path)[1].state_dict() for path in directory.checkpoints()[1:])
    assert largest_difference(eight, twelve) == 0
    assert directory.status()["result"]["val_nll"] == rows(directory)[8]["val_nll"] == rows(directory)[12]["val_nll"]


def test_a_clipped_gradient_above_the_threshold_is_left_out(lab, monkeypatch):
    """SGD at LR 1 moves by the clipped gradient: 0.4, the clip's norm, is above the threshold wherever the raw norm
    is."""
    real = Replica._backward

    def backward(self, examples, step):
        loss = real(self, examples, step)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad *= (0.7 if self.step + 1 in (3, 6) else 0.1) / norm
        return loss

    monkeypatch.setattr(Replica, "_backward", backward)
    plain = {"clip_norm": 0.4, "optimizer": {"name": "sgd"}, "lr_peak": 1.0}
    logged = rows(lab.train(lab.spec(guards={**SKIP, "post_clip_norm": 0.3}, **plain)))
    assert [step for step, row in logged.items() if step and row["update_norm"] == 0.0] == [3, 6]
    assert logged[3]["clipped_norm"] == pytest.approx(0.4, rel=1e-4)
    assert logged[3]["grad_norm"] == pytest.approx(0.7, rel=1e-4)
    stopped = lab.train(lab.spec(guards={"post_clip_norm": 0.3}, **plain)).status()
    assert (stopped["state"], stopped["reason"]) == (
        "diverged", "gradient norm after clipping is 0.4 at step 3, above guards.post_clip_norm=0.3"
    )  # fmt: skip


def test_the_budget_is_the_whole_run_s_and_once_spent_the_run_is_diverged(lab, poison):
    poison(3, 6, 9)
    status = lab.train(lab.spec(guards={**SKIP, "retries": 2})).status()
    assert (status["state"], status["reason"]) == (
        "diverged",
        "loss is nan at step 9; guards.retries=2 skipped steps are spent",
    )
    assert (status["result"]["skipped_steps"], status["result"]["val_nll"]) == (2, None)
    status = lab.train(lab.spec(guards={**RESTORE, "retries": 1})).status()
    assert (status["state"], status["reason"]) == (
        "diverged",
        "loss is nan at step 6; guards.retries=1 restores are spent",
    )


def test_a_step_that_was_taken_is_not_skipped(lab):
    directory = lab.train(lab.spec(guards=SKIP, lr_peak=1e30, optimizer={"name": "sgd"}))
    status = directory.status()
    assert status["state"] == "diverged"
    assert "update norm is inf at step 1; the step was taken and cannot be skipped" in status["reason"]
    assert (
        lab.train(lab.spec(guards=RESTORE, lr_peak=1e30, optimizer={"name": "sgd"})).status()["result"]["restores"] == 9
    )


def test_a_guarded_run_is_judged_by_every_finite_loss_it_met(lab, monkeypatch, poison):
    """What made a restore necessary is not forgotten: the rise before it is a spike."""
    guarded = {
        "guards": RESTORE,
        "steps": 200,
        "lr_peak": 1e-2,
        "evaluation": {"every_steps": 20, "sequences": 8},
        "batch": 16,
    }
    poison(25)
    assert lab.train(lab.spec(**guarded)).status()["state"] == "stable"
    seen, real = [], run.SpikeWatch.update
    monkeypatch.setattr(
        run.SpikeWatch,
        "update",
        lambda self, step, loss: (seen.append(step), real(self, step, loss + 30 * (22 <= step <= 24)))[1],
    )
    status = lab.train(lab.spec(**guarded, seed=1)).status()
    assert (status["state"], status["result"]["restores"]) == ("spiked", 1)
    assert seen == [step for step in range(1, 201) if step != 25]


@pytest.mark.parametrize(
    ("guards", "killed_at", "left_at"), [(SKIP, (7, 10), (3,)), (RESTORE, (2, 5, 7, 9, 10), (3, 7, 8))]
)
def test_a_guarded_run_interrupted_or_killed_resumes_bit_for_bit(lab, poison, guards, killed_at, left_at, tmp_path):
    """Left after a step as a launcher leaves it, or as a kill -9 leaves it: a copy of the folder in that moment,
    without a checkpoint of it."""
    poison(3, 7, 10)
    kept = {"every_steps": 3, "keep_last": 2, "keep_best": 1}
    spec = lab.spec(guards=guards, checkpoint=kept, log={"gradients": 2}, lr_peak=1e-2)
    directory = lab.directory(spec)
    killed = []
    for number, _ in enumerate(run.train(spec, directory, cache_dir=lab.cache, device="cpu"), 1):
        if number in killed_at:
            killed.append(shutil.copytree(directory.path, tmp_path / f"killed_{number}" / directory.run_id))
    whole = everything(directory)
    assert whole["result"]["skipped_steps"] + whole["result"]["restores"] == 3
    for path in killed:
        copy = RunDirectory.at(path)
        list(run.train(spec, copy, cache_dir=lab.cache, device="cpu"))
        assert everything(copy) == whole, path
    for stop_at in left_at:
        shutil.rmtree(directory.path)
        lab.train(spec, steps=stop_at)
        assert everything(lab.train(spec)) == whole, stop_at


def everything(directory: RunDirectory):
    """All that a run leaves but its clocks."""
    status = directory.status()
    return {
        "metrics": directory.metrics_file.read_bytes(),
        "gradients": directory.gradients_file.read_bytes(),
        "checkpoints": {path.name: (path / "model.safetensors").read_bytes() for path in directory.checkpoints()},
        "result": {key: value for key, value in status["result"].items() if key not in ("wall_s", "step_s")},
        "verdict": (status["state"], status["reason"]),
    }


def test_a_checkpoint_whose_next_step_fails_is_not_good_and_one_that_fails_again_is_no_longer(lab, poison):
    poison(5, 8, 9)
    directory = lab.train(lab.spec(guards=RESTORE, checkpoint={"every_steps": 2}))
    assert {step: row["restored_step"] for step, row in rows(directory).items() if "restored_step" in row} == {
        5: 2,
        8: 6,
        9: 2,
    }


def test_a_finite_checkpoint_of_parameters_that_have_blown_up_is_left_behind(lab, monkeypatch):
    """SGD at 1e6 moves one weight far off, that of a byte which the text never uses: loss, gradient and validation of
    that step are finite, and so are the parameters that it leaves. The gradient at those is planted as NaN: whether a
    real one overflows depends on how a processor rounds."""
    real = Replica._backward

    def backward(self, examples, step):
        loss, unused = real(self, examples, step), self.model.embedding.weight
        has_blown_up = unused[0, 0].abs() > 1e5
        for parameter in self.parameters:
            parameter.grad.fill_(NAN if has_blown_up else 0.0)
        if not has_blown_up:
            unused.grad[0, 0] = 1.0
        return loss

    monkeypatch.setattr(Replica, "_backward", backward)
    spec = lab.spec(
        guards={**RESTORE, "retries": 1},
        lr_peak=1e6,
        optimizer={"name": "sgd"},
        evaluation={"every_steps": 1, "sequences": 8},
    )
    directory = lab.train(spec)
    logged = rows(directory)
    assert logged[1]["update_norm"] == pytest.approx(1e6, rel=1e-3)
    assert logged[1]["val_nll"] == logged[0]["val_nll"], "what is kept at step 1 validates well, and is finite"
    assert logged[2]["restored_step"] == 0
    assert [path.name for path in directory.checkpoints()] == ["step_000001"]


def test_an_interruption_s_checkpoint_is_not_what_a_restore_goes_back_to(lab, poison):
    poison(7)
    spec = lab.spec(guards=RESTORE)
    directory = lab.train(spec, steps=6)
    assert "step_000006" in [path.name for path in directory.checkpoints()]
    lab.train(spec)
    assert rows(directory)[7]["restored_step"] == 4


def test_bad_steps_between_two_checks_are_taken_and_found_at_the_next(lab, poison):
    poison(6)
    directory = lab.train(lab.spec(guards={"check_every": 5}, evaluation={"every_steps": 9, "sequences": 8}))
    assert (directory.status()["state"], directory.status()["reason"]) == ("diverged", "loss is nan at step 9"), (
        "a validated step is always checked"
    )
    assert [row["loss"] is None for row in rows(directory).values()][1:] == [False] * 5 + [True] * 4
    restored = lab.train(lab.spec(guards={**RESTORE, "check_every": 5}, evaluation={"every_steps": 4, "sequences": 8}))
    assert rows(restored)[8]["restored_step"] == 4
    assert restored.status()["state"] in ("stable", "plateaued")
    assert all(
        tensor.isfinite().all()
        for path in restored.checkpoints()
        for tensor in checkpoint.load(path)[1].state_dict().values()
    )


def test_a_run_left_between_a_bad_step_and_its_check_saves_nothing_that_is_not_finite(lab, poison):
    poison(6)
    spec = lab.spec(guards={**RESTORE, "check_every": 5})
    whole = lab.train(spec).metrics_file.read_bytes()
    shutil.rmtree(lab.directory(spec).path)
    left = lab.train(spec, steps=7)
    assert [path.name for path in left.checkpoints()] == ["step_000004"]
    assert lab.train(spec).metrics_file.read_bytes() == whole


def test_without_guards_a_run_is_what_it_was(lab, poison):
    poison(7)
    directory = lab.train(lab.spec())
    status = directory.status()
    assert (status["state"], status["reason"]) == ("diverged", "loss is nan at step 7")
    assert (status["result"]["skipped_steps"], status["result"]["restores"]) == (0, 0)
    assert {frozenset(row) for row in rows(directory).values()} == {
        frozenset(("step", "loss", "grad_norm", "update_norm", "lr", "val_nll"))
    }
    assert not directory.gradients_file.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"guards": {"on_nonfinite": "skip_step"}},
            "guards.on_nonfinite=skip_step needs a number of retries .*; add guards.retries=3",
        ),
        ({"guards": {"retries": 3}}, "guards.retries=3 needs guards.on_nonfinite=skip_step or restore_last_good"),
        ({"guards": {**SKIP, "check_every": 2}}, "guards.check_every=2 is too rare for skip_step"),
        (
            {"guards": {"post_clip_norm": 1.0}},
            "guards.post_clip_norm=1 is never exceeded: gradients are clipped to clip_norm=1",
        ),
        (
            {"guards": RESTORE, "checkpoint": {"every_steps": 2, "keep_last": 1}},
            "guards.on_nonfinite=restore_last_good needs checkpoint.keep_last=2 or more",
        ),
        (
            {"guards": {"on_nonfinite": "skip"}},
            "guards.on_nonfinite='skip': input should be 'stop', 'skip_step' or 'restore_last_good'",
        ),
        ({"checkpoint": {"keep_last": 2}}, "checkpoint.keep_last=2 needs checkpoint.every_steps"),
    ],
)
def test_guards_that_could_do_nothing_are_refused(lab, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        lab.spec(**changes)
    assert len(str(caught.value).splitlines()) == 1
