"""Mamba-2 against a loop over positions, heads and numbers of the state, against the public module of transformers, and
against flash-linear-attention's slow recurrence."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability.mechanisms import build
from stability.models.init import initialise
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, check_equals_loop, inputs, moved
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within


def silu(number: float) -> float:
    return number / (1 + math.exp(-number))


def by_loops(layer, x_ND: Tensor, valid_N: list[bool]) -> dict[int, Tensor]:
    """The outputs of one sequence's valid positions: convolution, steps, decays, state and norm number by number."""
    features, taps = layer.conv.weight.shape[0], layer.conv.weight.shape[2]
    inner, heads = layer.out.weight.shape[1], len(layer.D)
    num_state, wide = (features - inner) // 2, inner // heads
    held, entered, outputs = torch.zeros(inner, num_state, dtype=torch.float64), [], {}
    for t, x_D in enumerate(x_ND):
        if not valid_N[t]:
            entered.append(torch.zeros(features, dtype=torch.float64))
            continue
        mapped = layer.in_proj.weight @ x_D + layer.in_proj.bias
        entered.append(mapped[inner:])
        read = []
        for feature in range(features):
            total = float(layer.conv.bias[feature])
            for back in range(min(taps, t + 1)):
                total += float(layer.conv.weight[feature, 0, taps - 1 - back] * entered[t - back][feature])
            read.append(silu(total))
        y = []
        for feature in range(inner):
            head = feature // wide
            step = math.log1p(math.exp(float(layer.dt_proj.weight[head] @ x_D + layer.dt_proj.bias[head])))
            kept = math.exp(-step * math.exp(float(layer.A_log[head])))
            total = float(layer.D[head]) * read[feature]
            for place in range(num_state):
                b, c = read[inner + place], read[inner + num_state + place]
                held[feature, place] = kept * float(held[feature, place]) + step * b * read[feature]
                total += c * float(held[feature, place])
            y.append(total * silu(float(mapped[feature])))
        size = math.sqrt(sum(each * each for each in y) / inner + 1e-5)
        normed = torch.tensor(
            [float(weight) * each / size for weight, each in zip(layer.norm.weight, y, strict=True)],
            dtype=torch.float64,
        )
        outputs[t] = layer.out.weight @ normed + layer.out.bias
    return outputs


@pytest.mark.parametrize("settings", [{"chunk": 4}, {"state": 3, "conv": 2, "expand": 1, "chunk": 5}])
@pytest.mark.parametrize("num_positions", [1, 3, 4, 17])
def test_equals_a_loop_over_positions_features_and_state(num_positions, settings):
    layer = moved("mamba2", **{"state": 4, **settings})
    check_equals_loop(layer, partial(by_loops, layer), num_positions)


@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_public_module(padded):
    """transformers' slow path, which is the paper's listing, computes in float32; its W_in ends in our w_Δ."""
    public = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    layer, x_BND = moved("mamba2", chunk=16).float(), inputs(torch.float32, 40)
    if padded:
        nn.init.zeros_(layer.in_proj.bias)  # their convolution reads it at padding
    config = public.Mamba2Config(
        hidden_size=WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH,
        state_size=64,
        expand=2,
        n_groups=1,
        conv_kernel=4,
        use_bias=True,
        chunk_size=8,
        layer_norm_epsilon=1e-5,
    )
    theirs = public.Mamba2Mixer(config, layer_idx=0).eval()
    own = layer.state_dict()
    given = {key: own[key] for key in ("A_log", "D", "norm.weight")} | {"dt_bias": own["dt_proj.bias"]}
    given |= {f"out_proj.{key}": own[f"out.{key}"] for key in ("weight", "bias")}
    given |= {f"conv1d.{key}": own[f"conv.{key}"] for key in ("weight", "bias")}
    given["in_proj.weight"] = torch.cat([own["in_proj.weight"], own["dt_proj.weight"]])
    given["in_proj.bias"] = torch.cat([own["in_proj.bias"], torch.zeros(HEADS)])
    theirs.load_state_dict(given, strict=True)
    mask_BN = None
    if padded:  # on the left and on the right: in the middle theirs forgets
        mask_BN = torch.ones(3, 40, dtype=torch.bool)
        mask_BN[0, :7] = mask_BN[1, 30:] = False
    with torch.no_grad():
        found, expected = layer(x_BND, mask_BN=mask_BN), theirs(x_BND, attention_mask=mask_BN)
    valid_BN = slice(None) if mask_BN is None else mask_BN
    torch.testing.assert_close(found[valid_BN], expected[valid_BN], rtol=1e-4, atol=1e-5)


def test_the_states_are_those_of_gated_linear_attention():
    """With C as queries, B as keys, Δu as values and e^(Δa) as the gate: the duality of the paper's section 5."""
    naive, layer, x_BND = fla_naive("simple_gla"), moved("mamba2", chunk=16).float(), inputs(torch.float32, 40)
    given: list[Tensor] = []
    layer.norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        layer(x_BND)
        z, mixed = layer.in_proj(x_BND).split((32, 160), -1)
        u, b, c = F.silu(layer.conv(mixed)).split((32, 64, 64), -1)
        step = F.softplus(layer.dt_proj(x_BND))
        u, b, c = u.unflatten(-1, (2, 16)), b[:, :, None].expand(-1, -1, 2, -1), c[:, :, None].expand(-1, -1, 2, -1)
        s, _ = naive.naive_recurrent_simple_gla(c, b, step[..., None] * u, -step * layer.A_log.exp(), scale=1.0)
        expected = (s + layer.D[:, None] * u).flatten(2) * F.silu(z)
    torch.testing.assert_close(given[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_rates_and_steps_begin_as_in_the_released_code_under_every_rule(rule):
    ranges: dict[str, tuple[float, float]]
    for ranges in ({"a_range": (1, 16), "dt_range": (0.001, 0.1)}, {"a_range": (2, 5), "dt_range": (0.02, 0.05)}):
        # the first ones are the defaults
        own: Any = ranges if ranges["a_range"][0] == 2 else {}
        layer: Any = build_seeded(lambda: build("mamba2", width=512, heads=512, direction="causal", **own))  # noqa: B023
        initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
        (low, high), (first, last) = ranges["a_range"], ranges["dt_range"]
        of_rates = (layer.A_log.double().exp() - low) / (high - low)
        of_steps = (F.softplus(layer.dt_proj.bias.double()).log() - math.log(first)) / math.log(last / first)
        for shares in (of_rates, of_steps):
            assert shares.min() >= -1e-5 and shares.max() <= 1 + 1e-5
            torch.testing.assert_close(shares.sort().values, torch.linspace(0, 1, 512).double(), rtol=0, atol=0.08)
        assert (layer.D == 1).all() and (layer.norm.weight == 1).all() and layer.dt_proj.weight.any()


def test_decays_that_leave_nothing_are_finite_and_exact_in_float32():
    """ΣΔa is −10³ over a chunk: its exponential is 0, and that of its negative no number."""
    layer, x_BND = moved("mamba2", chunk=32), inputs(num_positions=70)
    with torch.no_grad():
        layer.dt_proj.bias.copy_(torch.tensor([40.0, 0.0]))
        layer.A_log.copy_(torch.tensor([0.0, -4.0]))
        expected = layer(x_BND)
    layer, x_BND = layer.float(), x_BND.float().requires_grad_()
    found = layer(x_BND)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    leaves = [x_BND, *layer.parameters()]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.square().sum(), leaves))


def test_in_bfloat16_steps_and_state_are_in_float32():
    layer, x_BND = moved("mamba2").float(), inputs(torch.float32, 60)
    kept: list[Tensor] = []
    for part in (layer.dt_proj, layer.norm):
        part.register_forward_hook(lambda _, given, output: kept.extend([given[0], output]))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = layer(x_BND)
    expected = layer(x_BND)
    assert [each.dtype for each in kept[:4]] == [torch.float32] * 4 and torch.equal(kept[1], kept[5])
    error = (found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error > 1e-6, error
    # seven roundings of half a unit: both factors and the result of the first and the last map, and silu(z)
    assert_within(error, 7 * 2**-8)
