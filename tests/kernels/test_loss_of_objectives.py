"""Objectives with impl=triton have the loss, the gradient and the curvature of their reference."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model, build_objective
from stability.config.parse import parse_run
from stability.curvature import directional
from stability.models.passes import computing_in
from stability.objectives import Examples
from stability.runs.directory import read_jsonl
from tests.kernels.interpreted import interpreter_is_prepared_once  # noqa: F401, a fixture of every test here
from tests.kernels.test_loss import bounds
from tests.within import assert_within

V = 23
OBJECTIVES = [
    {"name": "mlm"},
    {"name": "ar"},
    {"name": "ar", "z_loss": 0.3},
    {"name": "score_entropy"},
    {"name": "score_entropy", "graph": "uniform", "noise": "loglinear"},
]
every_objective = pytest.mark.parametrize(
    "objective", OBJECTIVES, ids=lambda objective: "-".join(map(str, objective.values()))
)
BOTH = ("reference", "triton")


def problem(lab, objective, impl, batch=3):
    """(objective, shaken model, batch); of the last sequence the second half is padding, which does not count."""
    spec = lab.spec(objective={**objective, "impl": impl})
    built, model = build_objective(spec, V), build_model(spec, V)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))
    tokens = torch.randint(V, (batch, built.tokens_needed(16)), generator=generator)
    examples = built.examples(tokens, generator)
    mask_BN = torch.ones(examples.weights_BN.shape, dtype=torch.bool)
    mask_BN[-1, 8:] = False
    return built, model, examples._replace(weights_BN=examples.weights_BN * mask_BN, mask_BN=mask_BN)


def mean_and_gradient(lab, objective, impl, precision="float32"):
    built, model, examples = problem(lab, objective, impl)
    with computing_in(precision, "cpu"):
        total, count, _ = built.training_loss(model, examples)
    (total / count).backward()
    return (total / count).item(), torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.mark.parametrize(("precision", "rel"), [("float32", 1e-5), ("bf16", 1e-2)])
@every_objective
def test_loss_and_gradient_are_those_of_the_reference(lab, objective, precision, rel):
    (loss, gradient), (found, own) = (mean_and_gradient(lab, objective, impl, precision) for impl in BOTH)
    assert found == pytest.approx(loss, rel=rel)
    assert_within((own - gradient).norm(), rel * gradient.norm())


@every_objective
def test_curvature_by_taylor_is_that_of_the_reference(lab, objective):
    results = []
    for impl in BOTH:
        built, model, examples = problem(lab, objective, impl)
        params = {name: param.detach() for name, param in model.named_parameters()}
        generator = torch.Generator().manual_seed(5)
        direction = {name: torch.randn(param.shape, generator=generator) for name, param in params.items()}

        def loss(at, batch, built=built, model=model):
            return built.training_loss(model, batch, at)[:2]

        results.append(directional(loss, params, direction, "taylor", batches=examples.split(2)))
    reference, found = results
    built, model, examples = problem(lab, objective, "reference")
    of_slope, of_curvature = bounds(
        lambda at: torch.div(*built.training_loss(model, examples, at)[:2]), params, direction
    )
    assert found.loss == pytest.approx(reference.loss, rel=1e-5)
    assert found.slope == pytest.approx(reference.slope, abs=1e-5 * of_slope)
    assert found.curvature == pytest.approx(reference.curvature, abs=1e-5 * of_curvature)


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_gradient_zero(lab):
    built, model, examples = problem(lab, {"name": "score_entropy"}, "triton")
    nothing = Examples(
        examples.targets_BN, examples.targets_BN, torch.zeros_like(examples.weights_BN), sigma_B=examples.sigma_B
    )
    total, count = built.loss(model, nothing)
    total.backward()
    assert (total.item(), count.item()) == (0.0, 48.0)
    assert not model.head.weight.grad.any()


def test_a_run_of_three_steps_trains_as_the_reference_does(lab):
    losses = []
    for impl in BOTH:
        directory = lab.train(lab.spec(steps=3, objective={"name": "mlm", "impl": impl}))
        rows = read_jsonl(directory.metrics_file)
        losses.append([row[key] for row in rows for key in ("loss", "val_nll") if key in row and row[key] is not None])
    reference, found = losses
    assert len(reference) >= 3
    assert found == pytest.approx(reference, rel=1e-5)


def test_what_kernels_do_not_compute_is_refused_in_one_line(lab):
    spec = lab.spec(objective={"name": "ar", "impl": "triton"}, mechanism={"name": "sa"}).model_dump(mode="json")
    spec["objective"]["loss_chunk"] = 8
    with pytest.raises(
        ValueError, match=r"objective\.impl=triton has no kernel for loss_chunk=8; impl=reference computes it"
    ):
        parse_run(spec)
    with pytest.raises(ValueError, match=r"compile=true takes torch's own operations, and objective\.impl=triton has"):
        parse_run({**spec, "objective": {"name": "ar", "impl": "triton"}, "compile": True})
