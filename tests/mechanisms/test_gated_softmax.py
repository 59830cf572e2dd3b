"""Gated attention against loops over pairs, against transformers' own, and against `sa` with its gates open."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from stability.build import build_model, build_optimizer
from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.gated_softmax import GatedSoftmaxAttention
from stability.models.init import initialise
from tests.mechanisms.checks import build_seeded, check_equals_loop, inputs, padding
from tests.mechanisms.oracles import rotated

DIRECTIONS, GATES = ("bidirectional", "causal"), ("elementwise", "headwise")


def module(direction="bidirectional", **settings):
    layer = build_seeded(lambda: build("gated_softmax", width=16, heads=2, direction=direction, **settings)).double()
    with torch.no_grad():
        layer.gate.bias.copy_(torch.linspace(-1, 1, len(layer.gate.bias)))
    return layer


def by_loops(layer, x_ND, valid_N, *, causal):
    """One sequence's output, pair by pair, each entry of each head times its own gate."""
    width, head_width = x_ND.shape[1], x_ND.shape[1] // layer.heads
    q, k, v = (
        x_ND @ layer.qkv.weight[row : row + width].T + layer.qkv.bias[row : row + width]
        for row in (0, width, 2 * width)
    )
    gated = torch.zeros_like(v)
    for head in range(layer.heads):
        part = slice(head * head_width, (head + 1) * head_width)
        q_NK, k_NK = rotated(q[:, part]), rotated(k[:, part])
        for i in range(len(x_ND)):
            keys = [j for j in range(i + 1 if causal else len(x_ND)) if valid_N[j]]
            weights = [math.exp(float(q_NK[i] @ k_NK[j]) / math.sqrt(head_width)) for j in keys]
            for j, weight in zip(keys, weights, strict=True):
                gated[i, part] += weight / sum(weights) * v[j, part]
            for entry in range(part.start, part.stop):
                row = entry if len(layer.gate.weight) == width else head
                score = float(layer.gate.weight[row] @ x_ND[i] + layer.gate.bias[row])
                gated[i, entry] *= 1 / (1 + math.exp(-score))
    return gated @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_positions", [1, 9, 17, 40])
def test_equals_a_loop_over_pairs(num_positions, direction, gate):
    layer = module(direction, gate=gate)
    check_equals_loop(layer, partial(by_loops, layer, causal=direction == "causal"), num_positions)


@pytest.mark.parametrize("is_turned", [True, False])
def test_equals_the_attention_of_qwen3_next_without_its_norms_of_q_and_k(is_turned):
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    heads, width, x_BND = 4, 16, inputs(num_positions=11)
    config = Qwen3NextConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, head_dim=4, attention_bias=True
    )
    config._attn_implementation = "sdpa"  # the eager one takes its softmax in float32
    public = Qwen3NextAttention(config, layer_idx=0).double()
    public.q_norm = public.k_norm = nn.Identity()
    layer = build_seeded(lambda: build("gated_softmax", width=width, heads=heads, direction="causal")).double()
    if not is_turned:
        layer.rope = None
    with torch.no_grad():
        for name in ("weight", "bias"):
            q, k, v = getattr(layer.qkv, name).chunk(3)
            gate = getattr(layer.gate, name)
            if name == "bias":
                gate.copy_(torch.linspace(-2, 2, width))
            # queries and gates lie beside each other there, head by head
            both = torch.stack([q.unflatten(0, (heads, 4)), gate.unflatten(0, (heads, 4))], 1).flatten(0, 2)
            for part, value in (("q_proj", both), ("k_proj", k), ("v_proj", v), ("o_proj", getattr(layer.out, name))):
                getattr(getattr(public, part), name).copy_(value)
        angle_NK = torch.arange(11)[:, None] * 10_000.0 ** (-torch.tensor([0, 2, 0, 2], dtype=torch.float64) / 4)
        angle_NK = angle_NK if is_turned else torch.zeros_like(angle_NK)
        future = torch.full((11, 11), -math.inf, dtype=torch.float64).triu(1)[None, None]
        expected, _ = public(x_BND, (angle_NK.cos()[None], angle_NK.sin()[None]), future)
        torch.testing.assert_close(layer(x_BND), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("settings", [{}, {"mask_diagonal": True}, {"temperature": "learned"}])
def test_with_open_gates_it_is_sa_and_with_half_open_ones_half_of_it(gate, settings):
    layer, attention = (
        module("causal", gate=gate, **settings),
        build("sa", width=16, heads=2, direction="causal", **settings),
    )
    attention = attention.double()
    missing = attention.load_state_dict({**layer.state_dict()}, strict=False)
    assert not missing.missing_keys and missing.unexpected_keys == ["gate.weight", "gate.bias"]
    x_BND = inputs()
    with torch.no_grad():
        layer.gate.weight.zero_()
        expected = attention(x_BND, mask_BN=padding())[padding()]
        for bias, share in ((60.0, 1.0), (0.0, 0.5), (-60.0, 0.0)):
            layer.gate.bias.fill_(bias)
            found = layer(x_BND, mask_BN=padding())[padding()]
            wanted = attention.out.bias + share * (expected - attention.out.bias)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("gate", "rows"), [("elementwise", 16), ("headwise", 2)])
def test_has_a_map_of_gates_beside_the_parameters_of_sa(gate, rows):
    layer = module(gate=gate)
    own = sum(parameter.numel() for parameter in layer.parameters())
    assert own - sum(p.numel() for p in build("sa", width=16, heads=2).parameters()) == rows * (16 + 1)


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_gates_begin_half_open_under_every_rule_and_their_biases_are_not_decayed(rule):
    layer = build_seeded(lambda: build("gated_softmax", width=16, heads=2))
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    assert not layer.gate.bias.any() and layer.gate.weight.any()
    assert layer.own_decay == {"gate.bias": False}
    learned = build("gated_softmax", width=16, heads=2, temperature="learned")
    assert learned.own_decay == {"gate.bias": False, "log_temperature": False}


def test_a_model_without_biases_has_none_of_gates_either_as_in_the_paper(lab):
    model = {"name": "x", "layers": 2, "width": 16, "heads": 2, "positions": 16, "mixer_bias": "none"}
    spec = lab.spec(mechanism={"name": "gated_softmax"}, model=model)
    made = build_model(spec, 8)
    assert build_optimizer(spec, made).param_groups
    for block in made.blocks:
        assert block.mixer.gate.bias is None and block.mixer.qkv.bias is None and block.mixer.out.bias is None


def test_dropped_weights_are_those_of_the_softmax_and_not_the_gates():
    shape = MixerShape(16, 2, rope=None, dropout=0.5)
    layer = build_seeded(
        lambda: GatedSoftmaxAttention.build(validate_settings("mechanisms", "gated_softmax", {}), shape)
    )
    x_BND = inputs(torch.float32)
    assert not torch.equal(layer.train()(x_BND), layer(x_BND)) and torch.equal(layer.eval()(x_BND), layer(x_BND))
    with torch.no_grad():
        layer.qkv.weight[32:] = 0  # values that are the same everywhere
        layer.qkv.bias[32:] = 1
        layer.qkv.weight[:32] = 0
        gated = layer(x_BND) - layer.out.bias
        layer.out.weight.copy_(torch.eye(16))
        layer.out.bias.zero_()
        torch.testing.assert_close(layer(x_BND), torch.sigmoid(layer.gate(x_BND)), rtol=1e-5, atol=1e-6)
        assert gated.any()


def test_in_bfloat16_gates_are_taken_in_float32():
    layer = build_seeded(lambda: build("gated_softmax", width=16, heads=2))
    seen = []
    layer.out.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(inputs(torch.float32))
    assert seen == [torch.float32]
    torch.testing.assert_close(rounded.float(), layer(inputs(torch.float32)), rtol=0.05, atol=0.02)
