"""A tied head: logits, derivatives, files and optimizers know one matrix."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.build import build_model, build_objective, build_optimizer
from stability.curvature.products import directional, hvp
from stability.training.checkpoint import load
from tests.models.parity import SIZE, TOKENS, model_of, refused, shaken, spec_of


def untied_twin(tied):
    """A model of two matrices that begin alike, in which the head's is the embedding's first rows."""
    twin = model_of().double()
    state = tied.state_dict()
    state["head.weight"] = state["embedding.weight"][:29].clone()
    twin.load_state_dict(state)
    return twin


def test_a_tied_head_reads_with_the_embeddings_rows():
    tied = shaken(model_of(tied=True))
    twin = untied_twin(tied)
    assert set(dict(twin.named_parameters())) - set(dict(tied.named_parameters())) == {"head.weight"}
    torch.testing.assert_close(tied(TOKENS), twin(TOKENS), rtol=0, atol=1e-12)


def loss_of(model, params):
    logits = functional_call(model, params, (TOKENS,))
    return nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def test_gradient_and_curvature_of_the_one_matrix_are_those_of_both_added_up():
    """By the chain rule: with w → (w, w) the gradient is the sum of two blocks, and H v that of H (v, v)."""
    tied = shaken(model_of(tied=True))
    twin = untied_twin(tied)
    generator = torch.Generator().manual_seed(1)

    def derivatives(model, v):
        params = {name: value.detach() for name, value in model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH):
            along = {name: v[name] for name in params}
            return jvp(grad(lambda given: loss_of(model, given)), (params,), (along,))

    v = {name: torch.randn(value.shape, generator=generator).double() for name, value in tied.named_parameters()}
    gradient, product = derivatives(tied, v)
    of_both = derivatives(twin, v | {"head.weight": v["embedding.weight"][:29]})
    for found, expected in zip((gradient, product), of_both, strict=True):
        expected["embedding.weight"][:29] += expected.pop("head.weight")
        assert expected["embedding.weight"].abs().max() > 1e-4
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("more", [{}, {"embedding_width": 4}, {"loops": 2}, {"head_bias": False}])
def test_the_projects_own_hessian_sees_the_matrix_once(more):
    tied = shaken(model_of(tied=True, **more))
    params = {name: value.detach() for name, value in tied.named_parameters()}
    v = {name: torch.ones_like(value) for name, value in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        _, expected = jvp(grad(lambda given: loss_of(tied, given)), (params,), (v,))
        found = hvp(lambda given: loss_of(tied, given), params, v)
        along = directional(lambda given: loss_of(tied, given), params, v, method="taylor")
    assert set(found) == set(params)
    for name in params:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-11)
    assert along.curvature == pytest.approx(float(sum((v[name] * expected[name]).sum() for name in params)), rel=1e-9)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_tied_model_is_trained_saved_and_read_again(lab, position):
    size = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "tied": True}
    directory = lab.train(lab.spec(model=size, position=position))
    (last,) = sorted(directory.path.glob("checkpoints/step_*"))[-1:]
    spec, model = load(last)
    held = load_file(last / "model.safetensors")
    assert spec.model.tied
    assert set(held) == set(dict(model.named_parameters()))
    (table,) = [name for name, value in held.items() if value.shape == (257, 16)]
    assert not [name for name, value in held.items() if value.shape == (256, 16)]
    assert all(torch.equal(value, held[name]) for name, value in model.named_parameters())
    assert not torch.equal(held[table], build_model(spec, 256).state_dict()[table])


def test_an_optimizer_has_it_once_and_a_loss_in_chunks_is_the_same():
    spec = spec_of(model=SIZE | {"tied": True, "head_bias": False}, objective={"name": "ar"})
    model = build_model(spec, 29)
    groups = build_optimizer(spec, model).param_groups
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert sum(id(model.embedding.weight) == each for each in held) == 1
    losses = []
    for chunk in (None, 3):
        objective = build_objective(spec_of(objective={"name": "ar", "loss_chunk": chunk}), 29)
        examples = objective.examples(
            torch.randint(29, (3, 9), generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        )
        total, _ = objective.loss(model, examples)
        losses.append((total, *torch.autograd.grad(total, list(model.parameters()))))
    for whole, chunked in zip(*losses, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_tied_is_refused():
    refused(
        "model.tied=true needs an objective that predicts the tokens",
        objective="classify",
        data="images",
        model=SIZE | {"positions": 64, "tied": True},
    )
    refused("the head starts at zero", objective="score_entropy", model=SIZE | {"tied": True})
    refused("model.init=sedd starts the head at zero", model=SIZE | {"tied": True, "init": "sedd"})
