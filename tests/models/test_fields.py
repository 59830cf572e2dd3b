"""Fields of the model: each changes what it says and nothing else, against sums, derivatives and files that know nothing
of how it is done."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.build import build_model, build_objective, build_optimizer
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.curvature.products import directional, hvp
from stability.training.checkpoint import load
from tests.models.parity import ours, shaken, spec_of

SIZE = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 8}
TOKENS = torch.randint(29, (3, 8), generator=torch.Generator().manual_seed(0))


def model_of(objective="mlm", **model):
    return ours(29, model=SIZE | model, objective=objective)


def refused(message, **changes):
    with pytest.raises(ValueError) as caught:
        parse_run(json.loads(spec_of().model_dump_json()) | changes)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


# --- tied ---------------------------------------------------------------------------------------------------------


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


def test_the_projects_own_hessian_sees_the_matrix_once():
    tied = shaken(model_of(tied=True))
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


# --- biases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["sa", "sc", "sw", "attentionx", {"name": "two_way", "of": "sa"}])
@pytest.mark.parametrize(("which", "left"), [("all", ("inner", "out")), ("out", ("out",)), ("none", ())])
def test_mixers_have_the_biases_that_are_asked_for(mechanism, which, left):
    model = ours(29, model=SIZE | {"mixer_bias": which}, mechanism=mechanism)
    maps = [(name, m) for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear) and ".mixer." in name]
    assert {"out" if name.endswith("out") else "inner" for name, m in maps if m.bias is not None} == set(left)
    assert all(m.bias is not None for name, m in model.blocks.named_modules() if name.endswith(("ffn.out", "hidden")))
    assert model(TOKENS).isfinite().all()


def test_cross_mechanisms_lose_theirs_too():
    model = ours(
        29, model=SIZE | {"mixer_bias": "none"}, cross="auto", objective={"name": "mlm", "context": 4}, mechanism="sc"
    )
    assert not [name for name, _ in model.named_parameters() if ".cross.mechanism." in name and name.endswith(".bias")]
    assert [name for name, _ in model.named_parameters() if ".cross.mechanism." in name]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_a_bias_is_one_whose_bias_is_zero(tied):
    plain, without = shaken(model_of(tied=tied)), model_of(tied=tied, head_bias=False).double()
    with torch.no_grad():
        plain.head.bias.zero_()
    without.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "head.bias"})
    assert torch.equal(plain(TOKENS), without(TOKENS))
    assert sum(value.numel() for value in plain.parameters()) == 29 + sum(v.numel() for v in without.parameters())


def test_biases_that_are_not_there_cannot_start_anywhere():
    refused("model.qk_bias=2 is where biases start", model=SIZE | {"qk_bias": 2.0, "mixer_bias": "out"})


# --- init ---------------------------------------------------------------------------------------------------------


def test_torchs_own_start_is_what_the_constructors_drew():
    """U(±1/√inputs) for weights and biases alike, N(0, 1) for the table."""
    model = ours(200, model=SIZE | {"width": 64, "init": "torch", "layers": 1})
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            for value in (module.weight, module.bias):
                assert value.abs().max() <= bound, name
                assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15), name
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.05)


def test_a_size_that_a_rule_does_not_read_is_refused():
    for rule in ("torch", "nanogpt", "sedd"):
        refused("model.embedding_std=0.5 belongs to model.init=ours", model=SIZE | {"embedding_std": 0.5, "init": rule})


# --- ids ----------------------------------------------------------------------------------------------------------

OTHERS = {"init": "nanogpt", "tied": True, "head_bias": False, "mixer_bias": "none"}


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_left_alone_is_in_no_id_and_any_other_value_is(field):
    plain = spec_of(model=SIZE)
    neutral = getattr(plain.model, field)
    assert run_id(spec_of(model=SIZE | {field: neutral})) == run_id(plain)
    assert run_id(spec_of(model=SIZE | {field: OTHERS[field]})) != run_id(plain)
