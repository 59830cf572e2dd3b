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

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms._neural_memory import linear_block
from stability.mechanisms.titans import Titans
from stability.models.init import initialise
from stability.models.position import Rope
from tests.mechanisms.checks import BATCH, HEADS, WIDTH, build_seeded, inputs
from tests.mechanisms.oracles import rotated
from tests.mechanisms.sight_checks import scattered_padding
from tests.sizes import with_slow
from tests.within import assert_within

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
@pytest.mark.parametrize("num_positions", with_slow([1, 9, 40], [70]))
def test_equals_a_loop_in_which_autograd_differentiates_the_inner_loss(num_positions, settings, chunk):
    layer, x_BND = module(**settings), inputs(num_positions=num_positions)
    for mask_BN in (None, scattered_padding(num_positions)):
        y_BND = layer(x_BND, mask_BN=mask_BN).detach()
        for b in range(BATCH if num_positions < 40 else 1):
            valid_N = [True] * num_positions if mask_BN is None else mask_BN[b].tolist()
            expected = by_loop(layer, x_BND[b], valid_N, chunk).detach()[valid_N]
            assert_within((y_BND[b][valid_N] - expected).norm(), 1e-10 * expected.norm())


@pytest.mark.parametrize(("memory", "reaches"), [("none", False), ("linear", True), ("mlp", True)])
def test_a_memory_sees_past_the_window_and_without_it_nothing_does(memory, reaches):
    layer = module(**{**GATED, "memory": memory})
    x_BND = inputs(num_positions=30).requires_grad_()
    (gradient_BND,) = torch.autograd.grad(layer(x_BND)[:, -1].sum(), x_BND)
    assert bool(gradient_BND[:, :26].any()) is reaches and gradient_BND[:, 26].any()


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_gates_and_the_first_network_begin_as_they_say_under_every_rule(rule):
    layer: Any = build_seeded(lambda: build("titans", width=WIDTH, heads=HEADS, direction="causal", memory="mlp"))
    first_HFK = layer.first_HFK.detach().clone()
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    begun = {name: gate.bias.sigmoid().tolist() for name, gate in gates_of(layer)}
    assert begun == {name: pytest.approx([at] * 2) for name, at in (("rate", 0.5), ("momentum", 0.5), ("forget", 0.01))}
    assert torch.equal(layer.first_HFK, first_HFK) and 0.8 < first_HFK.std() < 1.2


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
    config = validate_settings("mechanisms", "titans", settings)
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
    config, shape = validate_settings("mechanisms", "titans", {}), MixerShape(128, 4, "causal")
    assert Titans.cost(config, shape, 4096) == 8 * Titans.cost(config, shape, 512)
    assert Titans.state_size(config, shape, 4096) == Titans.state_size(config, shape, 64)


def test_the_window_drops_a_share_of_its_weights_in_training_and_a_memory_none():
    for settings, drops in (({}, False), ({**GATED, "memory": "none"}, True)):
        shape = MixerShape(WIDTH, HEADS, "causal", dropout=0.5)
        config = validate_settings("mechanisms", "titans", settings)
        layer = build_seeded(lambda: Titans.build(config, shape))  # noqa: B023
        x_BND = inputs(torch.float32)
        assert torch.equal(layer.eval()(x_BND), layer(x_BND))
        assert torch.equal(layer.train()(x_BND), layer.eval()(x_BND)) is not drops


def test_only_the_window_is_rotated():
    for settings, turned in (({}, False), (GATED, True)):
        config = validate_settings("mechanisms", "titans", settings)
        found = [
            build_seeded(
                lambda: Titans.build(config, MixerShape(WIDTH, HEADS, "causal", rope=rope))  # noqa: B023
            )(inputs(torch.float32))
            for rope in (Rope(), None)
        ]
        assert torch.equal(*found) is not turned
