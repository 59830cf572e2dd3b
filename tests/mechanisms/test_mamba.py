"""Mamba against a loop over positions and numbers of the state, and against the public module of transformers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability.mechanisms import build
from stability.mechanisms.mamba import selective_scan
from stability.models.init import initialise
from tests.mechanisms.checks import WIDTH, build_seeded, check_equals_loop, inputs, moved
from tests.within import assert_within


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def by_loops(layer, x_ND: Tensor, valid_N: list[bool]) -> dict[int, Tensor]:
    """The outputs of one sequence's valid positions: convolution, steps, decays and state number by number."""
    inner, taps = layer.conv.weight.shape[0], layer.conv.weight.shape[2]
    num_state, rank = layer.A_log.shape[2], layer.dt_proj.weight.shape[1]
    held, entered, outputs = torch.zeros(inner, num_state, dtype=torch.float64), [], {}
    for t, x_D in enumerate(x_ND):
        if not valid_N[t]:
            entered.append(torch.zeros(inner, dtype=torch.float64))
            continue
        uz = layer.in_proj.weight @ x_D + layer.in_proj.bias
        entered.append(uz[:inner])
        u = torch.zeros(inner, dtype=torch.float64)
        for feature in range(inner):
            total = float(layer.conv.bias[feature])
            for back in range(min(taps, t + 1)):
                total += float(layer.conv.weight[feature, 0, taps - 1 - back] * entered[t - back][feature])
            u[feature] = total * sigmoid(total)
        mapped = layer.x_proj.weight @ u
        low, b, c = mapped[:rank], mapped[rank : rank + num_state], mapped[rank + num_state :]
        y = torch.zeros(inner, dtype=torch.float64)
        for feature in range(inner):
            step = math.log1p(math.exp(float(layer.dt_proj.weight[feature] @ low + layer.dt_proj.bias[feature])))
            for place in range(num_state):
                rate = math.exp(float(layer.A_log[0, feature, place]))
                kept = math.exp(-rate * step) * float(held[feature, place])
                held[feature, place] = kept + step * float(b[place] * u[feature])
                y[feature] += float(c[place] * held[feature, place])
            y[feature] += float(layer.D[feature] * u[feature])
            gate = float(uz[inner + feature])
            y[feature] *= gate * sigmoid(gate)
        outputs[t] = layer.out.weight @ y + layer.out.bias
    return outputs


@pytest.mark.parametrize("settings", [{"chunk": 4}, {"state": 3, "conv": 2, "expand": 1, "dt_rank": 5, "chunk": 5}])
@pytest.mark.parametrize("num_positions", [1, 3, 4, 17])
def test_equals_a_loop_over_positions_features_and_state(num_positions, settings):
    layer = moved("mamba", **{"state": 4, **settings})
    check_equals_loop(layer, partial(by_loops, layer), num_positions)


@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_public_module(padded):
    """transformers' slow path computes its scan in float32."""
    public = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    layer, x_BND = moved("mamba").float(), inputs(torch.float32, 40)
    config = public.MambaConfig(hidden_size=WIDTH, state_size=16, expand=2, conv_kernel=4, use_bias=True)
    theirs = public.MambaMixer(config, layer_idx=0).eval()
    ours = {key.replace("out.", "out_proj."): value for key, value in layer.state_dict().items()}
    ours = {key.replace("conv.", "conv1d."): value for key, value in ours.items()}
    theirs.load_state_dict({**ours, "A_log": ours["A_log"][0]}, strict=True)
    mask_BN = None
    if padded:  # on the left and on the right: in the middle theirs forgets, and its convolution reads biases there
        nn.init.zeros_(layer.in_proj.bias)
        nn.init.zeros_(theirs.in_proj.bias)
        mask_BN = torch.ones(3, 40, dtype=torch.bool)
        mask_BN[0, :7] = mask_BN[1, 30:] = False
    with torch.no_grad():
        found, expected = layer(x_BND, mask_BN=mask_BN), theirs(x_BND, attention_mask=mask_BN)
    valid_BN = slice(None) if mask_BN is None else mask_BN
    torch.testing.assert_close(found[valid_BN], expected[valid_BN], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_rates_and_steps_begin_as_in_the_released_code_under_every_rule(rule):
    for first, last in ((0.001, 0.1), (0.02, 0.05)):
        layer: Any = build_seeded(
            lambda: build("mamba", width=256, heads=1, direction="causal", dt_range=(first, last))  # noqa: B023
        )
        initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
        steps = nn.functional.softplus(layer.dt_proj.bias.double())
        assert first * 0.9999 <= steps.min() and steps.max() <= last * 1.0001
        shares = (steps.log() - math.log(first)) / math.log(last / first)
        torch.testing.assert_close(shares.sort().values, torch.linspace(0, 1, 512).double(), rtol=0, atol=0.08)
        rates = -layer.A_log.exp()
        torch.testing.assert_close(rates, -torch.arange(1.0, 17).expand(1, 512, 16), rtol=1e-6, atol=0)
        assert (layer.D == 1).all() and layer.dt_proj.weight.any()


def test_the_rank_of_the_steps_is_a_sixteenth_of_the_width_rounded_up():
    wide = build("mamba", width=100, heads=4, direction="causal")
    assert wide.get_parameter("dt_proj.weight").shape == (200, 7)


def test_decays_that_leave_nothing_are_finite_and_exact_in_float32():
    """Σ ΔA is −10⁵ over a chunk: its exponential is 0, and that of its negative no number."""
    generator = torch.Generator().manual_seed(2)
    u, dt, b, c = (torch.randn(2, 60, size, dtype=torch.float64, generator=generator) for size in (6, 6, 5, 5))
    dt, a = (2 * dt).exp(), -torch.logspace(-3, 4, 30, dtype=torch.float64).unflatten(0, (1, 6, 5))
    wide = selective_scan(u, dt, a, b, c, chunk=16)
    leaves = [part.float().requires_grad_() for part in (u, dt, a, b, c)]
    found = selective_scan(*leaves, chunk=16)
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=1e-5 * float(wide.abs().max()))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.square().sum(), leaves))


def test_in_bfloat16_the_state_is_kept_in_float32():
    layer, x_BND = moved("mamba").float(), inputs(torch.float32, 60)
    kept: list[torch.dtype] = []
    layer.dt_proj.register_forward_hook(lambda _, given, output: kept.extend([given[0].dtype, output.dtype]))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = layer(x_BND)
    expected = layer(x_BND)
    assert kept[:2] == [torch.float32] * 2
    error = (found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error > 1e-6, error
    # seven roundings of half a unit: both factors and the result of the first and the last map, and silu(z)
    assert_within(error, 7 * 2**-8)
