"""A schedule-free run moves one set of weights and is validated, kept and gone on with by what it says: closed forms of
z and x from the weights that move, and interruptions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from stability.build import build_objective
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.corpora.cache import load
from stability.optimizers import use_averages
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.runs.directory import RunDirectory
from stability.training import checkpoint, loop
from stability.training.evaluate import Validation
from stability.training.run import Trainer, train
from stability.training.weights import Weights
from tests.conftest import Lab
from tests.within import assert_within

CPU = torch.device("cpu")
BETA = 0.8
FREE = {
    "optimizer": {"name": "schedulefree_adamw", "beta1": BETA, "weight_decay": 0.1},
    "lr_peak": 1e-2,
    "steps": 6,
    "evaluation": {"every_steps": 3, "sequences": 8},
}


def begun(lab, spec) -> tuple[Trainer, Iterator[None]]:
    """A run and its steps."""
    trainer = Trainer(spec, lab.directory(spec), load(lab.cache, spec.data_fingerprint), CPU)
    return trainer, loop.train(trainer.directory, nullcontext(trainer))


def bits(trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters]


def by_name(trainer, tensors) -> dict[str, torch.Tensor]:
    return dict(zip(dict(trainer.model.named_parameters()), tensors, strict=True))


def validated(lab, spec, model) -> float:
    corpus = load(lab.cache, spec.data_fingerprint)
    return Validation(spec, corpus, build_objective(spec, corpus.format), CPU).measure(model)["val_nll"]


def test_a_checkpoint_holds_the_mean_of_all_z_and_beside_it_what_moves(lab):
    """z is read back from what moves at every step, y = (1 − β)z + βx, with the x that the z so far make."""
    spec = lab.spec(**FREE)
    (trainer, steps), zs, ys = begun(lab, spec), [], []
    for step, _ in enumerate(steps, 1):
        ys = [each.double() for each in bits(trainer)]
        # x = (x' (t − 1) + z)/t at a rate that is always the same, put into y
        means = [torch.stack(each).mean(0) for each in zip(*zs, strict=True)] if zs else [torch.zeros(())] * len(ys)
        share = 1 / step
        found = [(y - BETA * (1 - share) * x) / (1 - BETA + BETA * share) for y, x in zip(ys, means, strict=True)]
        zs.append(found)
    folder = trainer.checkpoints._folder(spec.steps)
    stored, beside = load_file(folder / checkpoint.MODEL), checkpoint.load_trainer(folder)
    means = by_name(trainer, [torch.stack(each).mean(0) for each in zip(*zs, strict=True)])
    own, moving = by_name(trainer, ys), beside[checkpoint.MOVING]
    for name, mean in means.items():
        assert torch.equal(moving[name].double(), own[name])
        assert_within((stored[name].double() - mean).abs().max(), 1e-6)
        assert (stored[name].double() - own[name]).abs().max() > 1e-6
    rows = [json.loads(line) for line in trainer.directory.metrics_file.read_text().splitlines()]
    _, model = checkpoint.load(folder)
    assert validated(lab, spec, model) == rows[-1]["val_nll"]
    model.load_state_dict(moving)
    assert validated(lab, spec, model) != rows[-1]["val_nll"]


def test_validation_leaves_what_moves_alone_bit_for_bit_even_where_it_fails(lab, monkeypatch):
    trainer = lab.replica(lab.spec(**FREE))
    for step in (1, 2):
        trainer.train_step(step)
    before = bits(trainer)
    trainer.measure()
    assert all(map(torch.equal, before, trainer.parameters))
    with use_averages(trainer.optimizer):
        assert not any(map(torch.equal, before, trainer.parameters))
    assert all(map(torch.equal, before, trainer.parameters))

    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.validation, "measure", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.measure()
    assert all(map(torch.equal, before, trainer.parameters))


@pytest.mark.parametrize("steps", [3, 4])
def test_an_interrupted_run_goes_on_bit_for_bit(lab, tmp_path_factory, steps):
    spec, elsewhere = lab.spec(**FREE), Lab(tmp_path_factory.mktemp("whole"))
    lab.train(spec, steps=steps)
    resumed, whole = lab.train(spec), elsewhere.train(elsewhere.spec(**FREE))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    for one, other in zip(resumed.checkpoints(), whole.checkpoints(), strict=True):
        assert (one / checkpoint.MODEL).read_bytes() == (other / checkpoint.MODEL).read_bytes()
        moving = [checkpoint.load_trainer(folder)[checkpoint.MOVING] for folder in (one, other)]
        assert all(torch.equal(value, moving[1][name]) for name, value in moving[0].items())


def test_a_run_that_goes_on_from_another_s_checkpoint_moves_what_that_one_moved(lab):
    first = lab.spec(**FREE)
    whole = lab.train(first)
    second = lab.spec(**FREE, init={"run": run_id(first), "step": 3})
    rest = lab.train(second)
    assert rest.metrics_file.read_bytes().splitlines()[-3:] == whole.metrics_file.read_bytes().splitlines()[-3:]
    ends = [(each.checkpoints()[-1] / checkpoint.MODEL).read_bytes() for each in (rest, whole)]
    assert ends[0] == ends[1]


def test_what_is_taken_back_is_what_moved(lab):
    trainer, steps = begun(lab, lab.spec(**FREE, guards={"on_nonfinite": "restore_last_good", "retries": 2}))
    for _ in range(4):
        next(steps)
    trainer.guard.good, trainer.guard.untried = [3], []
    assert trainer._take_back() == 3
    moving = checkpoint.load_trainer(trainer.checkpoints._folder(3))[checkpoint.MOVING]
    assert all(torch.equal(value, moving[name]) for name, value in trainer.model.named_parameters())


def test_a_run_that_starts_from_its_weights_starts_from_those_that_were_validated(lab):
    first = lab.train(lab.spec(**FREE))
    folder = first.checkpoints()[-1]
    asked = {"source": f"ckpt:{folder}", "sha256": checkpoint.sha256_of(folder / checkpoint.MODEL), "label": "first"}
    spec = lab.spec(weights=asked)
    kept = Weights(spec.weights, folder / checkpoint.MODEL)
    trainer = Trainer(spec, lab.directory(spec), load(lab.cache, spec.data_fingerprint), CPU, None, kept)
    assert trainer.measure()["val_nll"] == first.status()["result"]["val_nll"]


def test_alpha_max_starts_from_what_moves(lab):
    spec = lab.spec(**FREE)
    loaded = Loaded.read(lab.train(spec).checkpoints()[-1], lab.cache)
    probe = Probe(loaded, CurvatureSpec(warmup_steps=0, recorded_steps=1, clip_norm=1.0), CPU)
    moving = loaded.trainer[checkpoint.MOVING]
    assert all(torch.equal(value, moving[name]) for name, value in probe.model.named_parameters())
    assert not all(torch.equal(value, moving[name]) for name, value in loaded.model.named_parameters())
    (row,) = probe.rows("checkpoint")
    assert row is not None and math.isfinite(row["alpha_max"])
    loaded.model.load_state_dict(moving)
    examples = probe._batch(CurvatureSpec().warmup_batches)
    total, count = probe.objective.training_loss(loaded.model, examples)[:2]
    assert row["loss_before"] == pytest.approx(float(total / count), rel=1e-6)


@pytest.mark.slow  # two processes that import torch; tests/training/test_parallel.py keeps a plain run in the fast suite
def test_a_run_split_over_two_processes_keeps_the_averages_of_one(lab, tmp_path):
    spec = lab.spec(**FREE | {"steps": 3})
    ends = []
    for shards in (1, 2):
        directory = RunDirectory(tmp_path / str(shards), lab.directory(spec).run_id)
        for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", devices=shards, shard=shards > 1):
            pass
        folder = directory.checkpoints()[-1]
        moving = checkpoint.load_trainer(folder)[checkpoint.MOVING]
        ends.append((load_file(folder / checkpoint.MODEL), moving, directory.status()["result"]["val_nll"]))
    for alone, split in zip(ends[0][:2], ends[1][:2], strict=True):
        for name, value in alone.items():
            assert_within((split[name] - value).abs().max(), 1e-5)
    assert ends[1][2] == pytest.approx(ends[0][2], abs=1e-4)
