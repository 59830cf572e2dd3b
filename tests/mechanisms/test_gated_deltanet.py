"""Gated DeltaNet against its recurrence written out, the released slow reference, and the public layer of Qwen3-Next."""

from __future__ import annotations

import inspect

import pytest
import torch

from stability.mechanisms import build
from stability.mechanisms._delta_rule import delta_rule
from tests.mechanisms.checks import build_seeded, inputs
from tests.mechanisms.delta_loops import HEADS, WIDTH, module
from tests.within import assert_within


def public_layer(layer, expand_v: int):
    """Return transformers' layer with this one's parameters: its fused maps hold each head's q, k, v, gate (b, a) one
    after the other."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    width, wide = WIDTH // HEADS, expand_v * WIDTH // HEADS
    config = modeling.Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_value_heads=HEADS,
        linear_num_key_heads=HEADS,
        linear_key_head_dim=width,
        linear_value_head_dim=wide,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        num_hidden_layers=1,
    )
    public = modeling.Qwen3NextGatedDeltaNet(config, 0)
    q, k, v = (part.unflatten(0, (HEADS, -1)) for part in layer.qkv.weight.split(layer.rows))
    fused = torch.cat((q, k, v, layer.gate.weight.unflatten(0, (HEADS, -1))), 1)
    with torch.no_grad():
        public.in_proj_qkvz.weight.copy_(fused.flatten(0, 1))
        public.in_proj_ba.weight.copy_(torch.stack((layer.beta.weight, layer.decay.weight), 1).flatten(0, 1))
        public.conv1d.weight.copy_(layer.conv.weight)
        public.A_log.copy_(layer.A_log)
        public.dt_bias.copy_(layer.dt_bias)
        public.norm.weight.copy_(layer.norm.weight)
        public.out_proj.weight.copy_(layer.out.weight)
    return public


@pytest.mark.parametrize("expand_v", [1, 2])
def test_the_whole_layer_is_that_of_qwen3_next(monkeypatch, expand_v):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    # where fla and triton are installed the library takes fla's kernels, which need a GPU
    rule = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)
    layer = module("gated_deltanet", expand_v=expand_v).float()
    x_BND = inputs(torch.float32, num_positions=70)
    with torch.no_grad():
        expected = public_layer(layer, expand_v)(x_BND) + layer.out.bias
        found = layer(x_BND)
    assert_within((found - expected).norm(), 1e-4 * expected.norm())


def test_where_all_is_forgotten_each_position_reads_its_own_value():
    layer = module("gated_deltanet", conv=1)
    with torch.no_grad():
        layer.A_log.fill_(9.0)
        layer.dt_bias.fill_(9.0)
        x_BND = inputs()
        q, k, v, beta, g = layer.project(x_BND, None)
        expected = (q * k).sum(-1, keepdim=True) * beta[..., None] * v
    torch.testing.assert_close(delta_rule(q, k, v, beta, g, chunk=8), expected, rtol=1e-10, atol=1e-14)


def test_with_values_as_wide_as_keys_it_has_five_matrices_and_the_decays_parameters():
    sizes = {key: value.numel() for key, value in module("gated_deltanet").named_parameters()}
    assert sizes["qkv.weight"] + sizes["gate.weight"] + sizes["out.weight"] == 5 * 16 * 16
    assert sizes["decay.weight"] == 2 * 16 and sizes["A_log"] == sizes["dt_bias"] == 2
    wider = module("gated_deltanet", expand_v=2)
    assert wider.gate.weight.shape == (32, 16) and wider.out.weight.shape == (16, 32)


@pytest.mark.parametrize("fastest", [16.0, 0.5])
def test_its_rates_of_forgetting_begin_below_the_fastest(fastest):
    layer = build_seeded(lambda: build("gated_deltanet", width=512, heads=256, direction="causal", fastest=fastest))
    rates = layer.A_log.detach().exp()
    assert 0.01 <= rates.min() < 0.1 * fastest and 0.9 * fastest < rates.max() <= fastest
