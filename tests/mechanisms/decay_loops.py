"""Slow float64 oracles of the mixers whose state decays: one sequence, one head, one position after another, with what
is padded left out as if it were not there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def mapped(linear: nn.Linear, x_ND: Tensor, first: int, rows: int) -> Tensor:
    """W x + b of these rows of a linear map."""
    y_ND = x_ND @ linear.weight[first : first + rows].T
    return y_ND if linear.bias is None else y_ND + linear.bias[first : first + rows]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def swish(x_K: Tensor) -> Tensor:
    return torch.tensor([x * sigmoid(x) for x in x_K.tolist()], dtype=torch.float64)


def convolved(x_ND: Tensor, weight_D1W: Tensor, valid_N: list[bool]) -> Tensor:
    """The swish of Σ_j w_j x_{n−j}, where what is not valid counts as zeros."""
    taps, found_ND = weight_D1W.shape[2], torch.zeros_like(x_ND)
    for n in range(len(x_ND)):
        for back in range(min(taps, n + 1)):
            if valid_N[n - back]:
                found_ND[n] += weight_D1W[:, 0, taps - 1 - back] * x_ND[n - back]
        found_ND[n] = swish(found_ND[n])
    return found_ND


def scaled(x_K: Tensor, weight_K: Tensor, *, centred: bool) -> Tensor:
    """A norm of one vector by its root mean square, or by its standard deviation; ε as in the mixers' norms."""
    mean = float(x_K.mean()) if centred else 0.0
    square = sum((x - mean) ** 2 for x in x_K.tolist()) / len(x_K)
    return weight_K * (x_K - mean) / math.sqrt(square + 1e-5)


def carried(
    q_NK: Tensor, k_NK: Tensor, v_NV: Tensor, kept: Callable[[int], list[float]], valid_N: list[bool]
) -> Tensor:
    """S ← Diag(a) S + k vᵀ and o = Sᵀ q of one head, where ``kept`` gives a (K,) at a position; at what is not valid
    there is nothing, and zeros come out."""
    state_KV = torch.zeros(k_NK.shape[1], v_NV.shape[1], dtype=torch.float64)
    read_NV = torch.zeros_like(v_NV)
    for n, is_valid in enumerate(valid_N):
        if is_valid:
            for feature, share in enumerate(kept(n)):
                state_KV[feature] = share * state_KV[feature] + k_NK[n, feature] * v_NV[n]
            read_NV[n] = q_NK[n] @ state_KV
    return read_NV


def before_norm(layer: nn.Module, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
    """What enters the norm of a mixer that has one, in a forward pass: what its states give."""
    seen = []
    handle = layer.get_submodule("norm").register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    layer(x_BND, mask_BN=mask_BN)
    handle.remove()
    return seen[0]
