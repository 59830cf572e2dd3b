"""Padding through whole mechanisms and models: a row with one visible key, a fully padded row; loss and curvature stay
finite and exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call

from stability.curvature import directional
from stability.mechanisms import build as build_mechanism
from stability.registry import Registry

from .nets import random_direction
from .test_dense_oracle import MODELS, VOCABULARY, shaken_model, spec_of
from .test_taylor_models import assert_same, huggingface, module_loss, shaken

# images are never padded
TOKEN_MODELS = [model for model in MODELS if Registry("objectives").load(model[2]).corpus_kind == "tokens"]
LENGTHS = {"one_visible_key": [12, 1], "fully_padded_row": [12, 0], "nothing_but_padding": [0, 0]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=False))
def test_padding_leaves_every_mechanisms_curvature_finite_and_exact(name, lengths):
    mechanism = Registry("mechanisms").load(name)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    x = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for direction in sorted(mechanism.supported_directions(mechanism.Config())):
        module, params = shaken(build_mechanism(name, width=16, heads=2, direction=direction, num_layers=2))
        loss, u = module_loss(module, x, mask_BN=mask), random_direction(params)
        for method in ("taylor", "double_backward"):
            found = directional(loss, params, u, method)
            assert math.isfinite(found.loss) and math.isfinite(found.slope) and math.isfinite(found.curvature), (
                direction,
                method,
            )
        assert_same(loss, params, u)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_a_fully_padded_row_of_a_hugging_face_model_is_finite_and_exact(name):
    model, params = shaken(huggingface(name))
    params = {key: param.detach() for key, param in params.items()}
    tokens = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) < torch.tensor([12, 1, 0])[:, None]
    labels = tokens.masked_fill(~mask, -100)

    def loss(p):
        return functional_call(
            model, p, (), {"input_ids": tokens, "labels": labels, "attention_mask": mask.long()}
        ).loss

    assert math.isfinite(directional(loss, params, random_direction(params), "taylor").curvature)
    assert_same(loss, params, random_direction(params), rel=1e-6)


# a row of one key and a batch of padding alone are in the test of each mechanism above
@pytest.mark.parametrize(
    "lengths",
    [pytest.param(LENGTHS[name], id=name, marks=[pytest.mark.slow] * (name != "fully_padded_row")) for name in LENGTHS],
)
@pytest.mark.parametrize("model", TOKEN_MODELS, ids="-".join)
def test_padding_through_a_whole_model_is_finite_and_exact(model, lengths):
    spec = spec_of(*model)
    net = shaken_model(spec, 1.0)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    params = {name: param.detach() for name, param in net.named_parameters()}
    noise = {} if net.noise_level is None else {"sigma_B": torch.tensor([0.3, 1.2], dtype=torch.float64)}
    assert_same(module_loss(net, tokens, mask_BN=mask, **noise), params, random_direction(params))
