"""The z-loss by hand: in the training loss and α_max's alone, exact however a batch is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.build import build_objective
from stability.config.curvature import CurvatureSpec
from stability.config.parse import parse_run
from stability.corpora.cache import load
from stability.curvature import directional
from stability.objectives import training_examples
from stability.objectives._examples import z_loss_sum
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.registry import Registry
from stability.runs.directory import read_jsonl
from stability.training.checkpoint import load as load_checkpoint
from tests.identity.golden_ids import BASE
from tests.objectives.subjects import subject

NAMES = ("ar", "classify", "mlm", "recall")
WEIGHT = 0.3


def made(name: str, **settings: Any) -> tuple[Any, Any, Any]:
    """Return objective, model and examples, all in float64."""
    found = subject(name, z_loss=WEIGHT, **settings)
    examples = found.objective.examples(found.batch, torch.Generator().manual_seed(0))
    return (
        found.objective,
        found.model.eval(),
        examples.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor),
    )


def by_hand(logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
    """Return the sums of cross entropy and z-loss, written out position by position."""
    nll, z_loss = torch.zeros(2, dtype=torch.float64)
    for logits_V, target, weight in zip(
        logits_BNV.flatten(0, 1), examples.targets_BN.flatten(), examples.weights_BN.flatten(), strict=True
    ):
        log_z = logits_V.exp().sum().log()
        nll = nll + weight * (log_z - logits_V[target])
        z_loss = z_loss + WEIGHT * weight * log_z * log_z
    return nll, z_loss


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_training_adds_it_and_validation_does_not(name, chunk):
    objective, model, examples = made(name, loss_chunk=chunk)
    nll, z_loss = by_hand(examples.logits(model), examples)
    found = objective.training_loss(model, examples)
    torch.testing.assert_close(found.total, nll + z_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.auxiliary, z_loss, rtol=1e-12, atol=0)
    validated, count, _ = objective.validate(model, examples)
    torch.testing.assert_close(validated, nll, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.count, examples.weights_BN.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(count, found.count, rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_add_up_to_the_batch(name, chunk):
    objective, model, examples = made(name, loss_chunk=chunk)
    whole = objective.training_loss(model, examples)
    parts = [objective.training_loss(model, part) for part in examples.split(4)]
    assert len(parts) == 2
    for key in ("total", "count", "auxiliary"):
        summed = sum(getattr(part, key) for part in parts)
        torch.testing.assert_close(summed, getattr(whole, key), rtol=1e-12, atol=0)


def test_its_gradient_is_twice_log_z_times_the_probabilities():
    logits_BNV = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights_BN = torch.rand(2, 3, dtype=torch.float64)
    (gradient_BNV,) = torch.autograd.grad(z_loss_sum(logits_BNV, weights_BN), logits_BNV)
    exp_BNV = logits_BNV.detach().exp()
    z_BN1 = exp_BNV.sum(-1, keepdim=True)
    expected_BNV = weights_BN[..., None] * 2 * z_BN1.log() * exp_BNV / z_BN1
    torch.testing.assert_close(gradient_BNV, expected_BNV, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["taylor", "double_backward"])
@pytest.mark.parametrize("name", NAMES)
def test_curvature_of_the_training_loss_includes_it(name, method):
    objective, model, examples = made(name)
    params = {key: value.detach() for key, value in model.named_parameters()}
    draws = torch.Generator().manual_seed(1)
    along = {key: torch.randn(value.shape, dtype=value.dtype, generator=draws) for key, value in params.items()}

    def written_out(t: Tensor) -> Tensor:
        at = {key: value + t * along[key] for key, value in params.items()}
        logits = functional_call(model, at, (examples.inputs_BN,))
        return sum(by_hand(logits, examples), torch.zeros((), dtype=torch.float64))

    with sdpa_kernel(SDPBackend.MATH):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(written_out(t), t, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, t)
        found = directional(lambda at: objective.training_loss(model, examples, at).total, params, along, method=method)
    assert found.slope == pytest.approx(slope.item(), rel=1e-9)
    assert found.curvature == pytest.approx(curvature.item(), rel=1e-9)


def test_a_run_logs_it_beside_the_loss_and_validates_without_it(lab):
    """The first step of both runs sees one model and one batch."""
    runs = [lab.train(lab.spec(objective={"name": "ar", "z_loss": weight})) for weight in (0.0, 0.5)]
    (untrained, plain, *_), (same, first, *_) = (list(read_jsonl(run.metrics_file)) for run in runs)
    assert untrained == same and "val_nll" in same
    assert "auxiliary_loss" not in plain and first["auxiliary_loss"] > 0.5
    assert first["loss"] - first["auxiliary_loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert runs[0].run_id != runs[1].run_id


def test_the_curvature_that_a_run_logs_includes_it(lab):
    """Slope and curvature of ``log.curvature``, and of `stability.hessian`'s probe, along the logged step, by hand."""
    spec = lab.spec(
        objective={"name": "ar", "z_loss": WEIGHT},
        steps=6,
        lr_peak=1e-2,
        checkpoint={"every_steps": 1},
        log={"curvature": 6},
    )
    run = lab.train(spec)
    (row,) = read_jsonl(run.edge_file)
    corpus = load(lab.cache, spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    batch = training_examples(spec, corpus, objective, "train", 6, seed=0, batch=spec.batch)
    models = [load_checkpoint(run.path / "checkpoints" / f"step_00000{step}")[1].double().eval() for step in (5, 6)]
    before, after = ({key: value.detach() for key, value in model.named_parameters()} for model in models)

    def written_out(t: Tensor) -> Tensor:
        at = {key: value + t * (after[key] - value) / row["alpha"] for key, value in before.items()}
        sums = by_hand(functional_call(models[0], at, (batch.inputs_BN,)), batch)
        return (sums[0] + sums[1]) / batch.weights_BN.sum()

    with sdpa_kernel(SDPBackend.MATH):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(written_out(t), t, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, t)
    assert (row["slope"], row["curvature"]) == pytest.approx((slope.item(), curvature.item()), rel=2e-3)
    loaded = Loaded.read(run.path / "checkpoints" / "step_000005", lab.cache)
    protocol = CurvatureSpec(state=("checkpoint",), warmup_batches=1, warmup_steps=0, recorded_steps=1, parity_steps=0)
    probe = Probe(loaded, protocol, torch.device("cpu"))
    probe.descent.examples = lambda index: batch
    (measured,) = (each for each in probe.rows("checkpoint") if each is not None)
    assert (measured["slope"], measured["curvature"]) == pytest.approx((slope.item(), curvature.item()), rel=2e-3)


@pytest.mark.parametrize("name", ["multitrack", "score_entropy"])
def test_objectives_without_a_single_softmax_do_not_have_it(name):
    assert "z_loss" not in Registry("objectives").load(name).Config.model_fields


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError) as caught:
        parse_run(BASE | {"objective": {"name": "ar", "z_loss": -math.pi}})
    assert str(caught.value) == ("objective.z_loss=-3.141592653589793: input should be greater than or equal to 0")
