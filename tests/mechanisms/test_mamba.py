"""Mamba against a loop over positions and numbers of the state, and against the public module of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stability.config.parts import settings_of
from stability.curvature import directional
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.mamba import Mamba, selective_scan
from stability.models.init import initialise
from stability.optimizers._groups import kinds
from tests.mechanisms import checks
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.sight_checks import scattered_padding
from tests.mechanisms.state_spaces import CountProducts, moved
from tests.within import assert_within


def module(**settings) -> Any:
    return moved("mamba", **settings)


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
    layer, x_BND = module(**{"state": 4, **settings}), inputs(num_positions=num_positions)
    with torch.no_grad():
        for mask_BN in (None, padding(num_positions), scattered_padding(num_positions)):
            valid_BN = torch.ones(3, num_positions, dtype=torch.bool) if mask_BN is None else mask_BN
            found = layer(x_BND, mask_BN=mask_BN)
            for b in (0, 1):
                for t, expected in by_loops(layer, x_BND[b], valid_BN[b].tolist()).items():
                    torch.testing.assert_close(found[b, t], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_positions", [1, 16, 70])
def test_the_chunk_changes_no_result(num_positions):
    x_BND, mask_BN = inputs(num_positions=num_positions), scattered_padding(num_positions)
    expected = module()(x_BND, mask_BN=mask_BN)[mask_BN]
    for chunk in (1, 3, 64, 100):
        found = module(chunk=chunk)(x_BND, mask_BN=mask_BN)[mask_BN]
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_public_module(padded):
    """transformers' slow path computes its scan in float32."""
    public = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    layer, x_BND = module().float(), inputs(torch.float32, 40)
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


def test_nothing_is_forgotten_over_padding():
    """Without a short convolution, which counts positions, it is as if padding were not there."""
    layer, x_BND = module(conv=1, chunk=4), inputs(num_positions=7)
    alone = layer(x_BND)
    for places in (range(7), range(4, 11), [0, 1, 5, 6, 7, 9, 10], [2, 3, 4, 8, 9, 10, 11]):
        padded, mask_BN = torch.full((3, 12, WIDTH), 9.0, dtype=torch.float64), torch.zeros(3, 12, dtype=torch.bool)
        padded[:, list(places)], mask_BN[:, list(places)] = x_BND, True
        found = layer(padded, mask_BN=mask_BN)[:, list(places)]
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


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


def test_optimizers_of_matrices_take_the_maps_and_leave_rates_and_kernels():
    found = kinds(module())
    assert {name for name, kind in found.items() if kind == "matrices"} == {
        "in_proj.weight",
        "x_proj.weight",
        "dt_proj.weight",
        "out.weight",
    }
    assert module(dt_rank=3).own_splits == {"in_proj": (32, 32), "x_proj": (3, 16, 16), "dt_proj": (32,)}


def test_every_setting_is_read():
    def shapes(**settings):
        return {name: tuple(value.shape) for name, value in module(**settings).named_parameters()}

    usual = shapes()
    assert usual["A_log"] == (1, 32, 16) and usual["dt_proj.weight"] == (32, 1) and usual["conv.weight"] == (32, 1, 4)
    assert shapes(expand=3)["in_proj.weight"] == (96, 16) and shapes(state=5)["A_log"] == (1, 32, 5)
    assert shapes(conv=2)["conv.weight"] == (32, 1, 2) and shapes(dt_rank=7)["x_proj.weight"] == (39, 32)
    assert module(chunk=5).chunk == 5 and not torch.equal(
        module(dt_range=(1, 2)).dt_proj.bias, module(dt_range=(0.1, 0.2)).dt_proj.bias
    )
    wide = build("mamba", width=100, heads=4, direction="causal")
    assert wide.get_parameter("dt_proj.weight").shape == (200, 7)


def test_the_state_is_what_a_position_has_to_know_of_the_past():
    config = settings_of("mechanisms", "mamba", {"expand": 3, "state": 5, "conv": 4})
    for num in (8, 4096):
        assert Mamba.state_size(config, MixerShape(16, 2, "causal"), num) == 48 * 5 + 3 * 48


@pytest.mark.parametrize("num_positions", [1, 32, 50])
def test_cost_is_what_is_multiplied(num_positions):
    layer = module().float()
    with FlopCounterMode(display=False) as counter, CountProducts() as products, torch.no_grad():
        layer(torch.zeros(1, num_positions, WIDTH))
    found = Mamba.cost(settings_of("mechanisms", "mamba", {}), MixerShape(WIDTH, HEADS, "causal"), num_positions)
    assert found == counter.get_total_flops() / 2 + products.num


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
    layer, x_BND = module().float(), inputs(torch.float32, 60)
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


def test_taylor_equals_double_backward():
    layer = module(chunk=4, state=3)
    params = {name: value.detach() for name, value in layer.named_parameters()}
    direction = {name: torch.cos(1 + 7 * value) for name, value in params.items()}

    def loss(values):
        y_BND = torch.func.functional_call(layer, values, (inputs(),), {"mask_BN": padding()})
        return y_BND.tanh()[padding()].square().sum()

    by_taylor, twice = (directional(loss, params, direction, method) for method in ("taylor", "double_backward"))
    assert by_taylor.curvature == pytest.approx(twice.curvature, rel=1e-9)


def test_read_both_ways_it_sees_both_sides():
    layer = build_seeded(lambda: build("two_way", width=WIDTH, heads=HEADS, of="mamba", mamba={"chunk": 4}))
    checks.check_both_sides_are_seen(layer, lengths=(9,))
    checks.check_padding_is_unread(layer, lengths=(9,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expand": 0}, "mechanism.mamba.expand=0: input should be greater than or equal to 1"),
        ({"dt_range": (0, 1)}, "mechanism.mamba.dt_range.0=0: input should be greater than 0"),
        ({"dt_range": (0.1, 0.01)}, "mechanism.mamba.dt_range=[0.1, 0.01] must begin with the smaller number"),
        ({"dt_rank": 0}, "mechanism.mamba.dt_rank=0: input should be greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(settings, message):
    with pytest.raises(ValueError) as caught:
        build("mamba", width=16, heads=2, direction="causal", **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
