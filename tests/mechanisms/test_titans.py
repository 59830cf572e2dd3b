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

from stability.mechanisms import build
from tests.mechanisms.checks import BATCH, HEADS, WIDTH, build_seeded, inputs
from tests.mechanisms.oracles import rotated
from tests.mechanisms.sight_checks import scattered_padding

HEAD_WIDTH = WIDTH // HEADS
GATED = {"form": "gated_attention", "window": 3}


def module(**settings) -> Any:
    """A layer whose gates differ from head to head and depend much on what is read."""
    layer = build_seeded(lambda: build("titans", width=WIDTH, heads=HEADS, direction="causal", **settings)).double()
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
            eta, alpha = given.get("momentum", 0.0), given.get("forget", 0.0)
            theta = given["rate"] * (1 - eta) / chunk
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
    ({"momentum": False}, 1),
    ({"forgetting": False, "chunk": 4}, 4),
    ({"momentum": False, "forgetting": False, "conv": 1}, 1),
    ({"memory": "mlp"}, 16),
    ({"memory": "mlp", "chunk": 1, "activation": "tanh"}, 1),
    ({"memory": "mlp", "chunk": 5, "hidden": 1, "momentum": False}, 5),
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
