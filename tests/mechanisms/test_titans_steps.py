"""What the steps of `titans`' memories do: write, go on writing, forget, and stay bounded in every precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from stability.config.parts import validate_settings
from stability.mechanisms import _neural_memory, build
from stability.mechanisms._neural_memory import Gates, linear_memory
from tests.mechanisms import checks
from tests.mechanisms.checks import HEADS, WIDTH, inputs, padding
from tests.mechanisms.test_titans import GATED, module
from tests.within import assert_within


@pytest.mark.parametrize("settings", [{}, {"chunk": 2}, {"momentum": 0.0}])
def test_how_many_positions_are_taken_at_once_changes_nothing(settings, monkeypatch):
    layer, x_BND = module(**settings), inputs(num_positions=70)
    found = []
    for block in (1, 8, 32, 128):
        monkeypatch.setattr(_neural_memory, "LINEAR_BLOCK", block)
        found.append(layer(x_BND, mask_BN=padding(70)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


def gates(num: int, rate: float, kept: float = 1.0, carried: float = 0.0) -> Gates:
    """The same for one head at each position; carried = 0: no momentum."""
    one = torch.ones(1, 1, num, dtype=torch.float64)
    return Gates(math.log(kept) * one, math.log(carried) * one if carried else None, rate * one, one)


def test_a_full_step_writes_the_value_over_what_the_key_had():
    """At 2θ = 1 the gradient step is a projection: M_t k_t = v_t, and what an orthogonal key has stays."""
    k_BHNK = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2]][None, None]
    v_BHNK = torch.randn(1, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    recalled = linear_memory(k_BHNK, k_BHNK, v_BHNK, gates(4, 0.5), 1)
    torch.testing.assert_close(recalled, v_BHNK, rtol=1e-12, atol=1e-12)
    of_first = linear_memory(k_BHNK[:, :, :1].expand(-1, -1, 4, -1), k_BHNK, v_BHNK, gates(4, 0.5), 1)
    torch.testing.assert_close(of_first, v_BHNK[:, :, [0, 0, 2, 2]], rtol=1e-12, atol=1e-12)


def test_momentum_goes_on_writing_and_forgetting_takes_away():
    """What the first of orthogonal keys recalls later, in closed form: momentum adds η, η², … of it, forgetting leaves
    1 − α, (1 − α)², …; both are sums of their products, and without either it stays."""
    k_BHNK = torch.eye(6, dtype=torch.float64)[None, None]
    q_BHNK = k_BHNK[:, :, :1].expand(-1, -1, 6, -1)
    for kept, carried in ((1.0, 0.0), (0.7, 0.0), (1.0, 0.4), (0.7, 0.4)):
        found = linear_memory(q_BHNK, k_BHNK, k_BHNK, gates(6, 0.5, kept, carried), 6)[0, 0, :, 0]
        expected = [sum(kept ** (t - i) * carried**i for i in range(t + 1)) for t in range(6)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("memory", ["linear", "mlp"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_largest_steps_do_not_explode(memory, momentum):
    """θ at its largest, nothing forgotten, η between its ends from one position to the next, and keys that come again,
    nearly again, in turns of 3 and 8, or at random."""
    layer = module(memory=memory, momentum=momentum, forgetting=False, conv=1)
    with torch.no_grad():
        layer.rate.bias.fill_(40.0)
    generator = torch.Generator().manual_seed(6)
    random_BND = torch.randn(8, 600, WIDTH, dtype=torch.float64, generator=generator)
    one_BND = random_BND[:, :1]
    for x_BND in (
        random_BND,
        one_BND.expand(-1, 600, -1),
        one_BND + 0.1 * random_BND,
        random_BND[:, :3].repeat(1, 200, 1),
        random_BND[:, :8].repeat(1, 75, 1),
    ):
        with torch.no_grad():
            recalled = layer.recall(x_BND)
            largest = F.silu(layer.conv(layer.qkv(x_BND)))[..., 2 * WIDTH :].abs().max()
        assert recalled[:, :, -100:].abs().max() < 5 * largest


@pytest.mark.parametrize("momentum", [0.3, 0.8])
def test_no_periodic_sequence_of_keys_makes_a_linear_memory_s_error_grow(momentum):
    """The eigenvalues of a period's map of error and momentum, of a matrix's row, are within the unit circle, wherever
    η jumps between 0 and its largest, and θ between 0 and its largest."""
    generator = torch.Generator().manual_seed(9)
    rate = 2 * validate_settings("mechanisms", "titans", {"momentum": momentum}).largest_rate
    one = torch.eye(2, dtype=torch.float64).expand(300, -1, -1)
    for period in (2, 3, 5, 8):
        through = torch.eye(4, dtype=torch.float64).expand(300, -1, -1)
        for _ in range(period):
            k = F.normalize(torch.randn(300, 2, 1, dtype=torch.float64, generator=generator), dim=1)
            eta, theta = (top * torch.randint(2, (300, 1, 1), generator=generator) for top in (momentum, rate))
            push = -theta * k @ k.mT
            through = torch.cat([torch.cat([one + push, eta * one], 2), torch.cat([push, eta * one], 2)], 1) @ through
        assert torch.linalg.eigvals(through).abs().max() < 1 + 1e-9


def test_the_step_of_a_chunk_is_bounded():
    for settings, in_all in (
        ({"momentum": 0.0}, 1.0),
        ({}, 1 / 3),
        ({"momentum": 0.8, "chunk": 8}, 1 / 9),
        ({"memory": "mlp"}, 1 / 3),
        ({"memory": "mlp", "momentum": 0.0, "chunk": 2}, 1.0),
    ):
        layer = module(**settings)
        with torch.no_grad():
            layer.rate.weight.mul_(1e3)
            rate = layer.gates(inputs(), None).rate * layer.config.chunk_length
        assert 2 * rate.max() == pytest.approx(in_all) and rate.min() < 1e-6


@pytest.mark.parametrize("memory", ["linear", "mlp"])
def test_what_forgets_much_stays_finite_and_exact_in_float32(memory):
    """Logarithms of what is left are −96 and less within a block, where e^(+96) is no float32."""
    layer, x_BND = module(memory=memory), inputs(num_positions=200)
    with torch.no_grad():
        layer.forget.bias.fill_(6.0)
        layer.momentum.bias.fill_(-6.0)
        given = layer.gates(x_BND, None)
        assert given.log_kept[..., :16].sum(-1).max() < -60 and given.log_carried[..., :32].sum(-1).max() < -96
        expected = layer(x_BND)
        found = layer.float()(x_BND.float())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    y_BND = layer(x_BND.float())
    assert all(g.isfinite().all() for g in torch.autograd.grad(y_BND.square().sum(), list(layer.parameters())))


@pytest.mark.parametrize("settings", [{}, {"memory": "mlp"}, GATED], ids=str)
def test_in_bfloat16_gates_and_memory_are_in_float32(settings):
    layer, x_BND = module(**settings).float(), inputs(torch.float32, num_positions=60)
    expected = layer.gates(x_BND, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, recalled, y_BND = layer.gates(x_BND, None), layer.recall(x_BND), layer(x_BND)
    assert torch.equal(found.rate, expected.rate) and torch.equal(found.log_kept, expected.log_kept)
    assert recalled.dtype == torch.float32
    assert_within((recalled - layer.recall(x_BND)).norm(), 0.05 * recalled.norm())
    assert_within((y_BND - layer(x_BND)).norm(), 0.05 * y_BND.norm())


def test_what_begins_empty_learns():
    """W₁ is drawn, M and W₂ are zero: at the first position there is a value to read, and every gate has a gradient
    from the second on."""
    for memory in ("linear", "mlp"):
        layer = build("titans", width=WIDTH, heads=HEADS, direction="causal", memory=memory)
        assert layer.recall(inputs(torch.float32, num_positions=1)).abs().min() > 0
        checks.check_every_parameter_is_trained(layer)
