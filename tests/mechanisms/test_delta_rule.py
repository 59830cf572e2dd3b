"""The delta rule chunk by chunk against one position after another, and what its three mechanisms have in common."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._delta_rule import delta_rule
from stability.models.init import initialise
from stability.registry import Registry
from tests.mechanisms.checks import build_seeded, inputs
from tests.mechanisms.delta_loops import HEADS, NAMES, SHAPE, WIDTH, assert_is_by_loops, module
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within

every_name = pytest.mark.parametrize("name", NAMES)
DECAYS = [None, 1, 4]  # no decay, one for all features, one for each


def drawn(num: int, decays: int | None, *, log_decay: float = 3.0) -> Any:
    """Return q, k, v, β (up to 2) and ln a (down to −log_decay) of random numbers."""
    generator = torch.Generator().manual_seed(num)

    def normal(width: int):
        return torch.randn(2, 3, num, width, dtype=torch.float64, generator=generator)

    q, k, v = F.normalize(normal(4), dim=-1), F.normalize(normal(4), dim=-1), normal(5)
    beta = 2 * torch.rand(2, 3, num, dtype=torch.float64, generator=generator)
    g = None if decays is None else -log_decay * torch.rand(2, 3, num, decays, dtype=torch.float64, generator=generator)
    return q, k, v, beta, g


def one_by_one(q, k, v, beta, g):
    state, outputs = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=v.dtype), []
    for t in range(k.shape[2]):
        if g is not None:
            state = state * g[:, :, t].exp()[..., None]
        held = (k[:, :, t, :, None] * state).sum(-2)
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - held))[..., None, :]
        outputs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("num", [1, 5, 8, 23])
def test_chunks_of_any_size_give_what_one_position_after_another_gives(num, decays):
    given = drawn(num, decays)
    expected = one_by_one(*given)
    for chunk in (1, 2, 4, 8, 64):
        torch.testing.assert_close(delta_rule(*given, chunk=chunk), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("least", [-96.0, -3000.0])
@pytest.mark.parametrize("decays", [1, 4])
def test_whatever_is_forgotten_in_a_chunk_float32_stays_finite_and_exact(decays, least):
    """Sums of ln a reach ``least`` over a chunk of 32, some features forgetting all at once and others nothing: e^−G
    would be infinite, and G_i − G_j of float32 sums off by up to 1e-4."""
    q, k, v, beta, g = drawn(64, decays, log_decay=-least / 8)
    g = torch.where(torch.arange(64)[:, None] % 4 == torch.arange(decays), g, 0.01 * g / least)
    assert g.unflatten(2, (2, 32)).sum(3).min() < 0.7 * least
    single = [x.float().requires_grad_() for x in (q, k, v, beta, g)]
    double = [x.detach().double().requires_grad_() for x in single]
    found, expected = delta_rule(*single, chunk=32), one_by_one(*double)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((found * weight.float()).sum(), single)
    for one, two in zip(gradients, torch.autograd.grad((expected * weight).sum(), double), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-5 * float(two.abs().max()))


def test_without_forgetting_and_with_features_that_forget_alike_the_three_forms_agree():
    q, k, v, beta, g = drawn(13, 1)
    none = delta_rule(q, k, v, beta, chunk=4)
    for width in (1, 4):
        torch.testing.assert_close(delta_rule(q, k, v, beta, torch.zeros(2, 3, 13, width).double(), chunk=4), none)
    one = delta_rule(q, k, v, beta, g, chunk=4)
    torch.testing.assert_close(delta_rule(q, k, v, beta, g.expand(-1, -1, -1, 4), chunk=4), one)
    assert not torch.allclose(one, none)


def test_a_write_with_full_strength_replaces_what_a_key_held_and_one_of_two_turns_it():
    k = F.normalize(torch.randn(1, 1, 1, 4, dtype=torch.float64), dim=-1).expand(-1, -1, 2, -1)
    v = torch.randn(1, 1, 2, 5, dtype=torch.float64)
    read = delta_rule(k, k, v, torch.ones(1, 1, 2).double(), chunk=2)
    torch.testing.assert_close(read, v)
    beta = torch.tensor([[[1.0, 2.0]]]).double()
    turned = delta_rule(k, k, torch.cat((v[:, :, :1], 0 * v[:, :, :1]), 2), beta, chunk=2)
    torch.testing.assert_close(turned[:, :, 1], -v[:, :, 0])


@every_name
@pytest.mark.parametrize("settings", [{}, {"chunk": 32}, {"expand_v": 2, "conv": 2}])
def test_it_is_the_recurrence_written_out(name, settings):
    assert_is_by_loops(name, **settings)


@every_name
def test_strengths_up_to_two_are_of_the_setting(name):
    assert_is_by_loops(name, most=2.0, negative_eigenvalues=True)
    with pytest.raises(AssertionError, match="relative error"):
        assert_is_by_loops(name, most=1.0, negative_eigenvalues=True)


def released(name, q, k, v, beta, g):
    """Return what the released slow reference reads; those with decays have heads after positions."""
    if name == "deltanet":
        return fla_naive("delta_rule").delta_rule_recurrence(q * math.sqrt(8), k, v, beta)[0]
    q, k, v, beta, g = (x.transpose(1, 2) for x in (q, k, v, beta, g.squeeze(-1) if name == "gated_deltanet" else g))
    if name == "gated_deltanet":
        naive = fla_naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        return naive(q, k, v, beta, g, scale=1.0)[0].transpose(1, 2)
    return fla_naive("kda").naive_recurrent_kda(q, k, v, g, beta, scale=1.0)[0].transpose(1, 2)


@every_name
def test_its_state_map_is_that_of_the_released_reference(name):
    given = module(name, chunk=8).float().project(inputs(torch.float32, num_positions=40), None)
    expected = released(name, *given)
    assert_within((delta_rule(*given, chunk=8) - expected).norm(), 1e-4 * expected.norm())


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
@pytest.mark.parametrize(("name", "slowest", "num_steps"), [("gated_deltanet", 0.01, 256), ("kda", 1.0, 512)])
def test_decays_begin_as_released_under_every_rule(name, slowest, num_steps, rule):
    layer: Any = build_seeded(lambda: build(name, width=512, heads=256, direction="causal"))
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    rates, steps = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert slowest <= rates.min() < max(1.5 * slowest, 1) and 15 < rates.max() <= 16 and layer.A_log.shape == (256,)
    assert 0.00099 < steps.min() < 0.0012 and 0.085 < steps.max() < 0.101 and layer.dt_bias.shape == (num_steps,)
    assert float(steps.log().mean()) == pytest.approx(math.log(0.01), abs=0.3)


@every_name
def test_in_bfloat16_decays_strengths_and_the_state_are_in_float32(name):
    layer, x_BND = module(name).float(), inputs(torch.float32, num_positions=40)
    expected = layer.project(x_BND, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, y_BND = layer.project(x_BND, None), layer(x_BND)
        read = delta_rule(*expected, chunk=8)
    assert all(x is None or x.dtype == torch.float32 for x in found)
    assert torch.equal(found[3], expected[3]) and (name == "deltanet" or torch.equal(found[4], expected[4]))
    assert torch.equal(read, delta_rule(*expected, chunk=8)), "products of the rule are not rounded"
    error = (y_BND - layer(x_BND)).square().mean().sqrt() / layer(x_BND).square().mean().sqrt()
    assert y_BND.isfinite().all()
    assert_within(error, 0.05)


@every_name
@pytest.mark.parametrize("settings", [{}, {"expand_v": 2, "chunk": 8, "conv": 2}])
def test_cost_is_what_is_counted_and_grows_linearly(name, settings):
    """The counter sees matrix products; triangular systems, convolutions and their sizes are written down here."""
    kind, config = Registry("mechanisms").load(name), validate_settings("mechanisms", name, settings)
    layer, num = module(name, **settings).float(), 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.zeros(1, num, WIDTH))
    chunk, wide, features = config.chunk, config.expand_v * WIDTH, WIDTH * (2 + config.expand_v)
    systems = num / chunk * chunk * (chunk - 1) / 2 * (WIDTH + wide)
    diagonal = 0 if name == "deltanet" else 2 * num * WIDTH  # of each position's own q·k and k·k, by elements
    expected = counter.get_total_flops() / 2 + systems + diagonal + num * config.conv * features
    # the first chunk has no state before it, and the last leaves none
    unread = WIDTH // HEADS * WIDTH * wide // HEADS
    assert kind.cost(config, SHAPE, num) - expected == pytest.approx(unread)
    assert kind.cost(config, SHAPE, 2**20) == pytest.approx(2**14 * kind.cost(config, SHAPE, num), rel=1e-12)


@every_name
def test_long_sequences_take_heads_of_odd_width(name):
    layer = build_seeded(lambda: build(name, width=9, heads=3, direction="causal"))
    y_BND = layer(torch.randn(1, 300, 9, generator=torch.Generator().manual_seed(1)))
    assert y_BND.shape == (1, 300, 9) and y_BND.isfinite().all() and math.isfinite(float(y_BND.square().sum()))
