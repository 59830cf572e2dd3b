"""Memories that learn while they read, against a loop over positions in which autograd differentiates the inner loss.

The slow reference of flash-linear-attention is not used: what it subtracts is not the gradient of a loss (a parenthesis
is missing in its `v_new`; 294 % off the autograd gradient), and it is about another loss, behind a layer norm.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stability.config.parts import settings_of
from stability.curvature import directional
from stability.mechanisms import _neural_memory, build
from stability.mechanisms._base import MixerShape
from stability.mechanisms._neural_memory import Gates, linear_block, linear_memory
from stability.mechanisms.titans import Titans
from stability.models.init import initialise
from stability.models.position import Rope
from tests.mechanisms import checks
from tests.mechanisms.checks import BATCH, HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.oracles import rotated
from tests.mechanisms.sight_checks import scattered_padding

HEAD_WIDTH = WIDTH // HEADS
GATED = {"form": "gated_attention", "window": 3}


def module(**settings) -> Any:
    """A layer whose gates differ from head to head and depend much on what is read."""
    layer: Any = build_seeded(
        lambda: build("titans", width=WIDTH, heads=HEADS, direction="causal", **settings)
    ).double()
    with torch.no_grad():
        for name in layer.gate_maps:
            getattr(layer, name).weight.mul_(4)
            getattr(layer, name).bias.add_(torch.tensor([0.5, 1.5]))
    return layer


def memory_of(network: list[Tensor], x_K: Tensor, activation: str) -> Tensor:
    """M(x) of a matrix, or of two."""
    if len(network) == 1:
        return network[0] @ x_K
    first, second = network
    phi = {"silu": F.silu, "tanh": torch.tanh}[activation]
    return second @ phi(first @ x_K) / math.sqrt(len(first))


def recalled_by_loop(layer: Any, x_ND: Tensor, valid_N: list[bool], chunk: int) -> Tensor:
    """M_t(q_t) of one sequence, (N, D): every position that counts takes autograd's gradient of ‖M(k) − v‖² at the
    memory that stood before its chunk, in float64, by the paper's equations."""
    projected_NE = [
        layer.qkv.weight @ x_D + layer.qkv.bias if valid else torch.zeros_like(layer.qkv.bias)
        for x_D, valid in zip(x_ND, valid_N, strict=True)
    ]
    kernel = layer.conv.weight[:, 0]
    outputs = torch.zeros_like(x_ND)
    for head in range(HEADS):
        network = [torch.zeros(HEAD_WIDTH, HEAD_WIDTH, dtype=x_ND.dtype)]
        if layer.config.memory == "mlp":
            first = layer.first_HFK[head].detach().clone()
            network = [first, torch.zeros(HEAD_WIDTH, len(first), dtype=x_ND.dtype)]
        surprise = [torch.zeros_like(matrix) for matrix in network]
        rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
        for t in range(len(x_ND)):
            if t % chunk == 0:
                at_start = network
            if not valid_N[t]:
                continue
            seen = [projected_NE[t - back] * kernel[:, -1 - back] for back in range(min(kernel.shape[1], t + 1))]
            q_D, k_D, v_D = F.silu(torch.stack(seen).sum(0)).split(WIDTH)
            q, k, v = q_D[rows], k_D[rows], v_D[rows]
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            given = {
                name: torch.sigmoid(gate.weight[head] @ x_ND[t] + gate.bias[head]) for name, gate in gates_of(layer)
            }
            most = layer.config.momentum
            eta, alpha = most * given.get("momentum", 0.0), given.get("forget", 0.0)
            theta = given["rate"] * (1 - most) / (1 + most) / (2 * chunk)
            leaves = [matrix.detach().clone().requires_grad_() for matrix in at_start]
            loss = (memory_of(leaves, k.detach(), layer.config.activation) - v.detach()).square().sum()
            gradients = torch.autograd.grad(loss, leaves)
            surprise = [eta * old - theta * new for old, new in zip(surprise, gradients, strict=True)]
            network = [(1 - alpha) * old + step for old, step in zip(network, surprise, strict=True)]
            outputs[t, rows] = memory_of(network, q, layer.config.activation)
    return outputs.detach()


def gates_of(layer) -> list[tuple[str, nn.Linear]]:
    return [(name, getattr(layer, name)) for name in ("rate", "momentum", "forget") if hasattr(layer, name)]


def normed(y_ND: Tensor, weight_K: Tensor) -> Tensor:
    """Each head's features over their root mean square."""
    heads = [y_ND[:, n : n + HEAD_WIDTH] for n in range(0, WIDTH, HEAD_WIDTH)]
    return torch.cat([weight_K * y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() for y in heads], 1)


def attended_by_loop(layer, x_ND: Tensor, valid_N: list[bool]) -> Tensor:
    q, k, v = (x_ND @ layer.attention.weight.T + layer.attention.bias).split(WIDTH, 1)
    outputs = torch.zeros_like(x_ND)
    for n in range(0, WIDTH, HEAD_WIDTH):
        rows = slice(n, n + HEAD_WIDTH)
        q_NK, k_NK = rotated(q[:, rows]), rotated(k[:, rows])
        for i in range(len(x_ND)):
            seen = [j for j in range(max(0, i - layer.config.window), i + 1) if valid_N[j]]
            if seen:
                a = torch.stack([q_NK[i] @ k_NK[j] / math.sqrt(HEAD_WIDTH) for j in seen]).softmax(0)
                outputs[i, rows] = a @ v[seen][:, rows]
    return outputs


def by_loop(layer, x_ND: Tensor, valid_N: list[bool], chunk: int) -> Tensor:
    """The layer's output for one sequence."""
    y_ND = torch.ones_like(x_ND)
    if layer.config.memory != "none":
        y_ND = normed(recalled_by_loop(layer, x_ND, valid_N, chunk), layer.norm.weight)
    if layer.config.form == "gated_attention":
        gate_ND = torch.sigmoid(y_ND) if layer.config.memory != "none" else y_ND
        y_ND = normed(attended_by_loop(layer, x_ND, valid_N), layer.attention_norm.weight) * gate_ND
    return y_ND @ layer.out.weight.T + layer.out.bias


CASES = [
    ({}, 1),
    ({"chunk": 3}, 3),
    ({"chunk": 16}, 16),
    ({"chunk": 40}, 40),
    ({"momentum": 0.0}, 1),
    ({"forgetting": False, "chunk": 4}, 4),
    ({"momentum": 0.0, "forgetting": False, "conv": 1}, 1),
    ({"memory": "mlp"}, 16),
    ({"memory": "mlp", "chunk": 1, "activation": "silu"}, 1),
    ({"memory": "mlp", "chunk": 5, "hidden": 1, "momentum": 0.0}, 5),
    ({"memory": "mlp", "chunk": 3, "forgetting": False}, 3),
    ({**GATED, "memory": "linear"}, 1),
    ({**GATED, "memory": "mlp", "chunk": 4}, 4),
    ({**GATED, "memory": "none"}, 1),
]


@pytest.mark.parametrize(("settings", "chunk"), CASES, ids=str)
@pytest.mark.parametrize("num_positions", [1, 9, 40, 70])
def test_equals_a_loop_in_which_autograd_differentiates_the_inner_loss(num_positions, settings, chunk):
    layer, x_BND = module(**settings), inputs(num_positions=num_positions)
    for mask_BN in (None, scattered_padding(num_positions)):
        y_BND = layer(x_BND, mask_BN=mask_BN).detach()
        for b in range(BATCH if num_positions < 40 else 1):
            valid_N = [True] * num_positions if mask_BN is None else mask_BN[b].tolist()
            expected = by_loop(layer, x_BND[b], valid_N, chunk).detach()[valid_N]
            assert (y_BND[b][valid_N] - expected).norm() <= 1e-10 * expected.norm()


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
            recalled = layer.recalled(x_BND)
            largest = F.silu(layer.conv(layer.qkv(x_BND)))[..., 2 * WIDTH :].abs().max()
        assert recalled[:, :, -100:].abs().max() < 5 * largest


@pytest.mark.parametrize("momentum", [0.3, 0.8])
def test_no_periodic_sequence_of_keys_makes_a_linear_memory_s_error_grow(momentum):
    """The eigenvalues of a period's map of error and momentum, of a matrix's row, are within the unit circle, wherever
    η jumps between 0 and its largest, and θ between 0 and its largest."""
    generator = torch.Generator().manual_seed(9)
    rate = 2 * settings_of("mechanisms", "titans", {"momentum": momentum}).largest_rate
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


def test_padding_anywhere_is_as_if_it_were_not_there():
    """With a gradient for each position and no convolution nothing counts positions; S is not added to M there."""
    for settings in ({}, {"memory": "mlp", "chunk": 1}):
        layer, x_BND = module(conv=1, **settings), inputs(num_positions=7)
        alone = layer(x_BND)
        for places in (range(7), range(4, 11), [0, 1, 5, 6, 7, 9, 10], [2, 3, 4, 8, 9, 10, 11]):
            padded, mask_BN = torch.full((3, 12, 16), 9.0, dtype=torch.float64), torch.zeros(3, 12, dtype=torch.bool)
            padded[:, list(places)], mask_BN[:, list(places)] = x_BND, True
            found = layer(padded, mask_BN=mask_BN)[:, list(places)]
            torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("memory", "reaches"), [("none", False), ("linear", True), ("mlp", True)])
def test_a_memory_sees_past_the_window_and_without_it_nothing_does(memory, reaches):
    layer = module(**{**GATED, "memory": memory})
    x_BND = inputs(num_positions=30).requires_grad_()
    (gradient_BND,) = torch.autograd.grad(layer(x_BND)[:, -1].sum(), x_BND)
    assert bool(gradient_BND[:, :26].any()) is reaches and gradient_BND[:, 26].any()


def test_what_begins_empty_learns():
    """W₁ is drawn, M and W₂ are zero: at the first position there is a value to read, and every gate has a gradient
    from the second on."""
    for memory in ("linear", "mlp"):
        layer = build("titans", width=WIDTH, heads=HEADS, direction="causal", memory=memory)
        assert layer.recalled(inputs(torch.float32, num_positions=1)).abs().min() > 0
        checks.check_every_parameter_is_trained(layer)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 4},
        {"memory": "mlp", "chunk": 4},
        {"memory": "mlp", "chunk": 2, "momentum": 0.0},
        {"momentum": 0.0, "forgetting": False},
        {**GATED, "memory": "none"},
        {**GATED, "memory": "linear"},
    ],
    ids=str,
)
def test_keeps_the_contract_with_other_settings(settings):
    def made():
        return build("titans", width=WIDTH, heads=HEADS, direction="causal", **settings)

    for check in (checks.check_padding_is_unread, checks.check_future_is_unseen, checks.check_past_is_seen):
        check(build_seeded(made), lengths=(1, 17))
    checks.check_wholly_padded_is_finite(build_seeded(made), lengths=(9,))
    for check in (
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
        checks.check_every_parameter_is_trained,
    ):
        check(build_seeded(made))
    for check in (checks.check_save_load, checks.check_own_init_stays, checks.check_biases_may_go):
        check(made)


@pytest.mark.parametrize("settings", [{}, {"memory": "mlp", "chunk": 4, "activation": "silu"}, {**GATED, "chunk": 2}])
def test_taylor_engine_agrees_with_double_backward(settings):
    layer, mask_BN = module(**settings), padding(20)
    params = {name: value.detach() for name, value in layer.named_parameters()}
    generator = torch.Generator().manual_seed(8)
    direction = {
        name: torch.randn(value.shape, dtype=value.dtype, generator=generator) for name, value in params.items()
    }

    def loss(values: dict[str, Tensor]) -> Tensor:
        y_BND = torch.func.functional_call(layer, values, (inputs(num_positions=20),), {"mask_BN": mask_BN})
        return y_BND.tanh()[mask_BN].square().sum()

    by_taylor, twice = (directional(loss, params, direction, method) for method in ("taylor", "double_backward"))
    assert by_taylor.slope == pytest.approx(twice.slope, rel=1e-9)
    assert by_taylor.curvature == pytest.approx(twice.curvature, rel=1e-9)


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
        found, recalled, y_BND = layer.gates(x_BND, None), layer.recalled(x_BND), layer(x_BND)
    assert torch.equal(found.rate, expected.rate) and torch.equal(found.log_kept, expected.log_kept)
    assert recalled.dtype == torch.float32
    assert (recalled - layer.recalled(x_BND)).norm() < 0.05 * recalled.norm()
    assert (y_BND - layer(x_BND)).norm() < 0.05 * y_BND.norm()


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_gates_and_the_first_network_begin_as_they_say_under_every_rule(rule):
    layer: Any = build_seeded(lambda: build("titans", width=WIDTH, heads=HEADS, direction="causal", memory="mlp"))
    first_HFK = layer.first_HFK.detach().clone()
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    begun = {name: gate.bias.sigmoid().tolist() for name, gate in gates_of(layer)}
    assert begun == {name: pytest.approx([at] * 2) for name, at in (("rate", 0.5), ("momentum", 0.5), ("forget", 0.01))}
    assert torch.equal(layer.first_HFK, first_HFK) and 0.8 < first_HFK.std() < 1.2


def test_matrices_stand_by_themselves_and_the_network_belongs_to_adamw():
    layer = module(**GATED, memory="mlp")
    assert layer.own_splits == {"qkv": (16, 16, 16), "attention": (16, 16, 16)}
    assert layer.own_decay == {
        "rate.bias": False,
        "momentum.bias": False,
        "forget.bias": False,
        "first_HFK": False,
    }
    assert layer.first_HFK.ndim == 3 and layer.conv.weight.ndim == 3


SIZES = [  # settings, numbers in the state at N = 40 and what is in units of D² of the parameters
    ({}, 2 * 128 + 3 * 48, 4),
    ({"chunk": 2}, 3 * 128 + 3 * 48, 4),
    ({"momentum": 0.0, "conv": 2}, 128 + 48, 4),
    ({"memory": "mlp", "hidden": 3}, 3 * 2 * 2 * 8 * 24 + 3 * 48, 4),
    (GATED, 2 * 128 + 3 * 48 + 2 * 16 * 3, 7),
    ({**GATED, "memory": "none"}, 2 * 16 * 3, 4),
]


@pytest.mark.parametrize(("settings", "size", "matrices"), SIZES, ids=str)
def test_sizes_of_state_and_parameters_and_the_cost_that_the_flop_counter_counts(settings, size, matrices):
    layer, shape, num = module(**settings).float(), MixerShape(WIDTH, HEADS, "causal", rope=Rope()), 80
    config = settings_of("mechanisms", "titans", settings)
    assert Titans.state_size(config, shape, num) == size
    of_maps = [value.numel() for name, value in layer.named_parameters() if name.endswith(("qkv.weight", "out.weight"))]
    of_maps += [layer.attention.weight.numel()] if hasattr(layer, "attention") else []
    assert sum(of_maps) == matrices * WIDTH**2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.zeros(1, num, WIDTH))
    unseen = 0  # what the counter has no products for: the sums of the convolution, the inverse of triangular matrices
    if config.memory != "none":
        unseen += num * 3 * WIDTH * config.conv
    if config.memory == "linear":
        length = linear_block(num, config.chunk_length)
        unseen += HEADS * -(-num // length) * length**3
    assert counter.get_total_flops() == 2 * (Titans.cost(config, shape, num) - unseen)


def test_cost_and_state_grow_linearly_and_not_at_all():
    config, shape = settings_of("mechanisms", "titans", {}), MixerShape(128, 4, "causal")
    assert Titans.cost(config, shape, 4096) == 8 * Titans.cost(config, shape, 512)
    assert Titans.state_size(config, shape, 4096) == Titans.state_size(config, shape, 64)


def test_the_window_drops_a_share_of_its_weights_in_training_and_a_memory_none():
    for settings, drops in (({}, False), ({**GATED, "memory": "none"}, True)):
        shape = MixerShape(WIDTH, HEADS, "causal", dropout=0.5)
        config = settings_of("mechanisms", "titans", settings)
        layer = build_seeded(lambda: Titans.build(config, shape))  # noqa: B023
        x_BND = inputs(torch.float32)
        assert torch.equal(layer.eval()(x_BND), layer(x_BND))
        assert torch.equal(layer.train()(x_BND), layer.eval()(x_BND)) is not drops


def test_only_the_window_is_rotated():
    for settings, turned in (({}, False), (GATED, True)):
        config = settings_of("mechanisms", "titans", settings)
        found = [
            build_seeded(
                lambda: Titans.build(config, MixerShape(WIDTH, HEADS, "causal", rope=rope))  # noqa: B023
            )(inputs(torch.float32))
            for rope in (Rope(), None)
        ]
        assert torch.equal(*found) is not turned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"memory": "none"},
            "mechanism.titans.memory=none leaves nothing of form=memory_only; use form=gated_attention",
        ),
        ({"memory": "matrix"}, "mechanism.titans.memory='matrix': "),
        ({"chunk": 0}, "mechanism.titans.chunk=0: "),
        ({"conv": 0}, "mechanism.titans.conv=0: "),
        ({"hidden": 0}, "mechanism.titans.hidden=0: "),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(settings, message):
    with pytest.raises(ValueError) as caught:
        build("titans", width=16, heads=2, direction="causal", **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
