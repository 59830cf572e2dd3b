from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.build import build_model, build_objective, build_optimizer, resolve_device
from stability.models.backbone import num_parameters
from stability.residuals import build as build_residual


def test_the_same_spec_builds_the_same_weights_whatever_ran_before(lab):
    spec = lab.spec(mechanism={"name": "mix"})
    one = build_model(spec, 256).state_dict()
    torch.rand(7)
    before = torch.random.get_rng_state()
    two = build_model(spec, 256).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(torch.random.get_rng_state(), before)
    other = build_model(lab.spec(mechanism={"name": "mix"}, seed=1), 256).state_dict()
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_parameters_are_those_of_the_architecture(lab):
    """Embedding (V + mask)·D, head V·D + V, per block: two LayerNorms 4D, qkv and out 4D² + 4D, MLP 8D² + 5D; final
    LayerNorm 2D."""
    width, vocab = 16, 256
    expected = (
        (vocab + 1) * width
        + vocab * width
        + vocab
        + 2 * (4 * width + 4 * width**2 + 4 * width + 8 * width**2 + 5 * width)
        + 2 * width
    )
    assert num_parameters(build_model(lab.spec(), vocab)) == expected


def test_branch_outputs_start_scaled_by_depth_and_biases_at_zero(lab):
    spec = lab.spec(model={"name": "x", "layers": 2, "width": 64, "heads": 4, "positions": 16, "qk_bias": 1.5})
    model = build_model(spec, 256)
    default_std = 1 / math.sqrt(3 * 64)
    assert model.blocks[0].mixer.out.weight.std().item() == pytest.approx(default_std / 2, rel=0.05)
    assert model.blocks[0].mixer.qkv.weight.std().item() == pytest.approx(default_std, rel=0.05)
    qkv_bias = model.blocks[1].mixer.qkv.bias
    assert (qkv_bias[:128] == 1.5).all()
    assert (qkv_bias[128:] == 0).all()
    assert all(
        (module.bias == 0).all()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("qkv")
    )


def test_equal_query_and_key_biases_make_the_first_attention_local(lab):
    from stability.models.position import rope

    bias = torch.full((1, 32, 1, 16), 2.0)
    turned = rope(bias, position_dim=1)[0, :, 0]
    scores = turned @ turned.T / 4
    assert (scores.diagonal() >= scores.max() - 1e-5).all()
    assert scores[16, 17] > scores[16, 18] > scores[16, 19]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mechanism", ["sa", "sc", "sw", "mix"])
def test_the_whole_model_ignores_what_padding_holds(lab, norm, mechanism):
    model = build_model(lab.spec(norm=norm, mechanism={"name": mechanism}), 256).double()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(16)[None, :] < torch.tensor([[16], [10]])
    changed = torch.where(mask, tokens, (tokens + 1) % 256)
    assert torch.equal(model(tokens, mask)[mask], model(changed, mask)[mask])


def test_a_causal_model_predicts_from_the_past_alone(lab):
    for mechanism in ("sa", "sw"):
        model = build_model(lab.spec(objective={"name": "ar"}, mechanism={"name": mechanism}), 256).double()
        tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
        later = tokens.clone()
        later[0, 9:] = (later[0, 9:] + 1) % 256
        assert torch.equal(model(tokens)[:, :9], model(later)[:, :9])


def test_identity_residual_is_the_plain_sum():
    residual = build_residual("identity", width=8)
    x_BND = torch.randn(2, 3, 8)
    assert torch.equal(residual(x_BND, lambda u: 2 * u), 3 * x_BND)


def test_optimizers_take_their_settings(lab):
    spec = lab.spec(
        optimizer={"name": "adamw", "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}, lr_peak=0.25
    )
    group = build_optimizer(spec, build_model(spec, 256)).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (0.25, 0.5, (0.8, 0.95), 1e-6)
    spec = lab.spec(optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 0.1})
    group = build_optimizer(spec, build_model(spec, 256)).param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)


def test_the_mask_token_has_an_input_row_and_no_output_column(lab):
    spec = lab.spec()
    assert (build_objective(spec, 256).num_inputs, build_objective(spec, 256).num_outputs) == (257, 256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_a_clear_error():
    with pytest.raises(RuntimeError, match="use device=cpu or device=auto"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
