"""The mechanisms of the delta rule position by position from their papers' equations, in float64 and with matrices
written out; nothing here is theirs but the parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stability.config.parts import validate_settings
from stability.mechanisms._base import MixerShape
from stability.registry import Registry
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.within import assert_within

NAMES = ("deltanet", "gated_deltanet", "kda")
WIDTH, HEADS = 16, 2
SHAPE = MixerShape(WIDTH, HEADS, "causal")


def module(name: str, **settings: Any) -> Any:
    """Return a layer in float64 of which no parameter is where it begins: scales of 1 and biases of 0 hide mistakes."""
    layer: Any = build_seeded(
        lambda: Registry("mechanisms").load(name).build(validate_settings("mechanisms", name, settings), SHAPE)
    ).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(0.3 * torch.randn(value.shape, dtype=torch.float64, generator=generator))
        layer.qkv.weight.mul_(2)
        if name != "deltanet":
            layer.A_log.sub_(2.0)  # so that some of what is forgotten is left
    return layer


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def decay_of(name: str, layer: Any, x_D: Tensor, head: int, width: int) -> Tensor:
    """Return a_t of a head, (K,)."""
    if name == "deltanet":
        return torch.ones(width, dtype=x_D.dtype)
    part = slice(head * width, (head + 1) * width)
    if name == "gated_deltanet":
        step = (layer.decay.weight[head] @ x_D + layer.dt_bias[head]).expand(width)
    else:
        step = layer.decay_up.weight[part] @ (layer.decay_down.weight @ x_D) + layer.dt_bias[part]
    return torch.exp(-torch.exp(layer.A_log[head]) * torch.log(1 + torch.exp(step)))


def gate_of(name: str, layer: Any, x_D: Tensor) -> Tensor:
    if name == "deltanet":
        return torch.ones(len(layer.out.weight.T), dtype=x_D.dtype)
    if name == "gated_deltanet":
        gate = layer.gate.weight @ x_D
        return gate * sigmoid(gate)
    return sigmoid(layer.gate_up.weight @ (layer.gate_down.weight @ x_D) + layer.gate_up.bias)


def by_loops(name: str, layer: Any, x_ND: Tensor, valid_N: Tensor, *, most: float = 1.0) -> Tensor:
    """Return one sequence's output; zeros at padding. ``most``: the largest β."""
    width, taps = WIDTH // HEADS, layer.conv.weight.shape[2]
    wide = layer.out.weight.shape[1] // HEADS
    nothing = torch.zeros_like(layer.qkv.weight[:, 0])
    told = [layer.qkv.weight @ x_D if valid else nothing for x_D, valid in zip(x_ND, valid_N, strict=True)]
    states = [torch.zeros(width, wide, dtype=x_ND.dtype) for _ in range(HEADS)]
    y_ND = torch.zeros_like(x_ND)
    for t, x_D in enumerate(x_ND):
        if not valid_N[t]:
            continue
        mixed = torch.zeros_like(nothing)
        for back in range(min(taps, t + 1)):
            mixed = mixed + layer.conv.weight[:, 0, taps - 1 - back] * told[t - back]
        mixed = mixed * sigmoid(mixed)
        heads = []
        for head in range(HEADS):
            q, k = (mixed[start + head * width : start + (head + 1) * width] for start in (0, WIDTH))
            v = mixed[2 * WIDTH + head * wide : 2 * WIDTH + (head + 1) * wide]
            q, k = (u / torch.sqrt(u @ u + 1e-6) for u in (q, k))
            beta = most * sigmoid(layer.beta.weight[head] @ x_D)
            decayed = torch.diag(decay_of(name, layer, x_D, head, width)) @ states[head]
            turned = torch.eye(width, dtype=x_D.dtype) - beta * torch.outer(k, k)
            states[head] = turned @ decayed + beta * torch.outer(k, v)
            read = states[head].T @ (q / math.sqrt(width))
            heads.append(layer.norm.weight * read / torch.sqrt((read @ read) / wide + 1e-5))
        y_ND[t] = layer.out.weight @ (torch.cat(heads) * gate_of(name, layer, x_D)) + layer.out.bias
    return y_ND


def assert_is_by_loops(name: str, *, most: float = 1.0, **settings: Any) -> None:
    """Hold a layer to the loop at lengths within, at and beyond several chunks of 4, with padding and without."""
    layer = module(name, **{"chunk": 4, **settings})
    with torch.no_grad():
        for num, mask_BN in ((1, None), (3, None), (4, None), (11, None), (11, padding(11))):
            x_BND = inputs(num_positions=num)
            valid_BN = torch.ones(len(x_BND), num, dtype=torch.bool) if mask_BN is None else mask_BN
            found_BND = layer(x_BND, mask_BN=mask_BN)
            for x_ND, valid_N, found_ND in zip(x_BND, valid_BN, found_BND, strict=True):
                expected_ND = by_loops(name, layer, x_ND, valid_N, most=most)
                error = (found_ND - expected_ND)[valid_N].norm() / expected_ND[valid_N].norm()
                assert_within(error, 1e-10, f"N = {num}, {settings}: relative error {error:.1e}")
