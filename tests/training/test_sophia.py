"""Sophia's Hessian diagonal in a run: what is estimated, of which loss, when, and that nothing but the run's seed and
the step decide its draws."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from stability.build import build_objective
from stability.config.curvature import CurvatureSpec
from stability.corpora.cache import load
from stability.curvature import alpha_max
from stability.models.passes import dropping, generator_for
from stability.objectives import training_examples
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.runs.directory import RunDirectory
from stability.training import checkpoint
from stability.training.run import train
from stability.training.step import Replica
from tests.conftest import Lab
from tests.curvature.nets import dense_gradient_and_hessian, flatten
from tests.within import assert_within

CPU = torch.device("cpu")
SMALL = {"name": "small", "layers": 1, "width": 4, "heads": 2, "positions": 6}
SOPHIA = {"optimizer": {"name": "sophia", "gamma": 0.5, "hessian_every": 2, "weight_decay": 0.1}, "lr_peak": 3e-3}


def replica(lab, **changes) -> Replica:
    return lab.replica(lab.spec(**SOPHIA, **changes))


def batch(own: Replica, step: int):
    spec = own.spec
    return training_examples(spec, own.corpus, own.objective, "train", step, seed=spec.seed, batch=spec.batch)


def estimated(own: Replica, step: int) -> dict[str, torch.Tensor]:
    found = own._hessian_diagonal(batch(own, step), step)
    return {name: found[parameter] for name, parameter in own.model.named_parameters()}


@pytest.mark.redraws
def test_estimate_is_of_the_dense_hessian_of_the_steps_own_batch(lab):
    own = replica(lab, model=SMALL, objective={"name": "ar"}, microbatch=3)
    own.model.double()
    examples, params = batch(own, 7), dict(own.model.named_parameters())

    def loss(values):
        total, count = own.objective.training_loss(own.model, examples, values)[:2]
        return total / count

    _, hessian = dense_gradient_and_hessian(loss, params)
    draws = generator_for(own.spec.seed, "hessian", 7)
    z = flatten({name: torch.randn(p.shape, generator=draws, dtype=p.dtype) for name, p in params.items()})
    found, expected = flatten(estimated(own, 7)), z * (hessian @ z)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_microbatches_change_the_estimate_by_rounding_alone(lab):
    whole, cut = estimated(replica(lab), 3), estimated(replica(lab, microbatch=3), 3)
    other = estimated(replica(lab), 4)
    for name, value in whole.items():
        scale = value.abs().max()
        assert_within((cut[name] - value).abs().max(), 1e-4 * scale)
        assert not scale or (other[name] - value).abs().max() > 1e-2 * scale


@pytest.mark.redraws
def test_estimate_drops_what_the_steps_gradient_dropped_and_leaves_gradients_and_draws_alone(lab):
    own = replica(lab, model={**SMALL, "dropout": 0.5})
    state, again = torch.get_rng_state(), estimated(own, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in own.model.parameters())
    assert all(torch.equal(value, again[name]) for name, value in estimated(own, 1).items())
    own.model.double()
    examples, params = batch(own, 1), dict(own.model.named_parameters())

    def loss(values):
        with dropping(own.model, CPU, own.spec.seed, "train", 1, 0):
            total, count = own.objective.training_loss(own.model, examples, values)[:2]
        return total / count

    _, hessian = dense_gradient_and_hessian(loss, params)
    draws = generator_for(own.spec.seed, "hessian", 1)
    z = flatten({name: torch.randn(p.shape, generator=draws, dtype=p.dtype) for name, p in params.items()})
    torch.testing.assert_close(flatten(estimated(own, 1)), z * (hessian @ z), rtol=1e-8, atol=1e-10)


def test_an_estimate_is_taken_before_steps_1_and_k_plus_1_and_no_other(lab, monkeypatch):
    own, taken = replica(lab), []
    whole = Replica._hessian_diagonal
    monkeypatch.setattr(Replica, "_hessian_diagonal", lambda self, *a: taken.append(a[1]) or whole(self, *a))
    for step in range(1, 7):
        own.train_step(step)
    assert taken == [1, 3, 5]


def test_a_step_without_any_estimate_says_what_it_lacks():
    from stability.optimizers import build

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="sophia: a step needs an estimate of the Hessian's diagonal"):
        build("sophia", [("weight", weight)], lr=1e-3).step()


@pytest.mark.parametrize("steps", [4, 5])
def test_an_interrupted_run_goes_on_bit_for_bit(lab, tmp_path_factory, steps):
    spec, elsewhere = lab.spec(**SOPHIA, microbatch=3), Lab(tmp_path_factory.mktemp("whole"))
    lab.train(spec, steps=steps)
    resumed, whole = lab.train(spec), elsewhere.train(elsewhere.spec(**SOPHIA, microbatch=3))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    ends = [(each.checkpoints()[-1] / checkpoint.MODEL).read_bytes() for each in (resumed, whole)]
    assert ends[0] == ends[1]


@pytest.mark.slow  # two processes that import torch; tests/training/test_parallel.py keeps a plain run in the fast suite
def test_two_processes_give_the_bits_of_one(lab, tmp_path: Path):
    spec = lab.spec(**SOPHIA, microbatch=2, steps=4)
    ends = []
    for devices in (1, 2):
        directory = RunDirectory(tmp_path / str(devices), lab.directory(spec).run_id)
        for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", devices=devices):
            pass
        ends.append(
            (directory.metrics_file.read_bytes(), (directory.checkpoints()[-1] / checkpoint.MODEL).read_bytes())
        )
    assert ends[0] == ends[1]


def test_alpha_max_of_the_step_with_h_held_is_that_of_dense_float64(lab):
    """The run's last checkpoint: m takes the batch's clipped gradient in, h stays although a new estimate is due."""
    spec = lab.spec(**SOPHIA, model=SMALL, steps=6)
    loaded = Loaded.read(lab.train(spec).checkpoints()[-1], lab.cache)
    protocol = CurvatureSpec(state=("checkpoint",), warmup_batches=1, warmup_steps=0, recorded_steps=1, clip_norm=0.5)
    (row,) = Probe(loaded, protocol, CPU).rows("checkpoint")
    model, config = copy.deepcopy(loaded.model).double(), spec.optimizer.settings
    corpus = load(lab.cache, spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    examples = training_examples(spec, corpus, objective, "curvature", 1, seed=protocol.seed, batch=spec.batch)

    def loss(values):
        total, count = objective.training_loss(model, examples, values)[:2]
        return total / count

    params = dict(model.named_parameters())
    gradient, hessian = dense_gradient_and_hessian(loss, params)
    held = loaded.trainer["optimizer"]
    assert held["param_groups"][0]["step"] % config.hessian_every == 0
    mean, h = (
        torch.cat([held["state"][i][key].double().flatten() for i in range(len(params))]) for key in ("mean", "hessian")
    )
    mean = config.beta1 * mean + (1 - config.beta1) * gradient * min(1.0, 0.5 / float(gradient.norm()))
    ratio = mean / torch.maximum(config.gamma * h, torch.tensor(config.epsilon))
    u = -ratio.clamp(-1, 1) - config.weight_decay * flatten(params)
    assert 0 < int((ratio.abs() < 1).sum()) < len(u)
    slope, curvature = float(gradient @ u), float(u @ hessian @ u)
    assert row is not None and row["slope"] == pytest.approx(slope, rel=1e-4)
    assert row["curvature"] == pytest.approx(curvature, rel=1e-4)
    assert row["alpha_max"] == pytest.approx(alpha_max(slope, curvature), rel=1e-4)
