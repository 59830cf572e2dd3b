"""Initial weights. Two settings are a mechanism's own: where attention's q and k biases start (`model.qk_bias`), and `mechanism.sc.edge_gain`."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def initialise(model: nn.Module, num_branches: int, qk_bias: float) -> None:
    """Adjust what the modules' own constructors drew: no biases, and branch outputs scaled by 1/√(number of branches) (Radford et al. 2019).

    A branch's last projection is the module called ``out``; with 2L branches (3L with cross branches) the residual stream keeps its size through depth.
    ``qk_bias``: where the query and key biases of attention (the first two thirds of the module called ``qkv``) start. Equal ones give
    every pair the score b²·Σ cos θ_k(i − j) under RoPE, which falls off with distance: attention starts local. Weights that their module
    starts at zero (a conditioned model's modulations and head) stay there.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        role = name.rsplit(".", 1)[-1]
        if role == "out":
            module.weight.mul_(1 / math.sqrt(num_branches))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
            if role == "qkv":
                module.bias[: 2 * module.in_features] = qk_bias
