"""The loss in chunks against the loss of whole logits: value, gradient, second derivative, and what exists at once."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model, build_objective
from stability.curvature import directional
from stability.objectives import Examples, _examples

V = 23
OBJECTIVES = [
    {"name": "mlm"},
    {"name": "ar"},
    {"name": "score_entropy"},
    {"name": "score_entropy", "graph": "uniform", "noise": "loglinear"},
]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: "-".join(objective.values()))


def problem(lab, objective, chunk, dtype=torch.float64, batch=4):
    """(objective, shaken model, batch)."""
    spec = lab.spec(objective={**objective, "loss_chunk": chunk})
    built, model = build_objective(spec, V), build_model(spec, V).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype))
    tokens = torch.randint(V, (batch, built.tokens_needed(16)), generator=generator)
    return built, model, built.examples(tokens, generator)


def mean_and_gradient(lab, objective, chunk, dtype):
    built, model, examples = problem(lab, objective, chunk, dtype)
    total, count = built.loss(model, examples)
    (total / count).backward()
    return total / count, {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@every_objective
def test_loss_and_gradient_are_those_of_the_whole(lab, objective, chunk, dtype, rel):
    loss, gradient = mean_and_gradient(lab, objective, None, dtype)
    chunked, found = mean_and_gradient(lab, objective, chunk, dtype)
    assert chunked.item() == pytest.approx(loss.item(), rel=rel)
    norm = torch.stack([part.norm() for part in gradient.values()]).norm()
    assert gradient.keys() == found.keys()
    for name, part in gradient.items():
        assert (found[name] - part).norm() <= rel * norm, name


@every_objective
def test_second_derivatives_are_those_of_the_whole_at_parameters_that_are_not_the_models_own(lab, objective):
    results = []
    for chunk in (None, 7):
        built, model, examples = problem(lab, objective, chunk)
        generator = torch.Generator().manual_seed(5)
        params = {
            name: p.detach() + 0.02 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            for name, p in model.named_parameters()
        }
        direction = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}

        def loss(at, batch, built=built, model=model):
            return built.loss(model, batch, at)

        for method in ("taylor", "double_backward"):
            results.append(directional(loss, params, direction, method, batches=examples.split(3)))
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-12)
        assert result.slope == pytest.approx(results[0].slope, rel=1e-9)
        assert result.curvature == pytest.approx(results[0].curvature, rel=1e-9)


@every_objective
def test_no_more_logits_than_a_chunk_exist_at_once_and_none_where_nothing_counts(lab, objective, monkeypatch):
    built, model, examples = problem(lab, objective, 5)
    rows = []
    real = _examples.nn.functional.linear

    def spy(x, weight, bias):
        if weight.shape[0] == V:
            rows.append(x.shape[0])
        return real(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    total, _ = built.loss(model, examples)
    forward = list(rows)
    total.backward()
    assert max(rows) == 5
    assert sum(forward) == int((examples.weights_BN > 0).sum())
    assert sorted(rows) == sorted(2 * forward), "the backward pass computes every chunk again"


@every_objective
def test_without_gradients_nothing_is_kept_for_a_backward_pass(lab, objective):
    built, model, examples = problem(lab, objective, 5)
    whole, _, _ = problem(lab, objective, None)
    with torch.no_grad():
        total, count = built.loss(model, examples)
        expected, expected_count = whole.loss(model, examples)
    assert not total.requires_grad
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert count == expected_count


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_gradient_zero(lab):
    for chunk in (None, 5):
        built, model, examples = problem(lab, {"name": "score_entropy"}, chunk)
        nothing = Examples(
            examples.targets_BN, examples.targets_BN, torch.zeros_like(examples.weights_BN), sigma_B=examples.sigma_B
        )
        total, count = built.loss(model, nothing)
        total.backward()
        assert (total.item(), count.item()) == (0.0, 64.0)
        assert not model.head.weight.grad.any()


def test_a_whole_loss_is_what_it_was_before_there_were_chunks(lab):
    built, model, examples = problem(lab, {"name": "mlm"}, None, torch.float32)
    total, count = built.loss(model, examples)
    logits = model(examples.inputs_BN)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    assert torch.equal(total, (nll * examples.weights_BN.flatten()).sum())
    assert torch.equal(count, examples.weights_BN.sum())
