"""Initialise a model's weights. Three settings change them: where attention's q and k biases start (`model.qk_bias`),
the embeddings' size, and `mechanism.sc.edge_gain`."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def initialise(model: nn.Module, num_branches: int, qk_bias: float, embedding_std: float = 1.0) -> None:
    """Adjust what the modules' own constructors drew: no biases, and branch outputs scaled by 1/√(number of branches)
    (Radford et al. 2019).

    A branch's last projection is the module called ``out``; with 2L branches (3L with cross branches) the residual
    stream keeps its size through depth. ``qk_bias``: where the query and key biases of attention (the first two thirds
    of the module called ``qkv``) start. Equal ones give every pair the score b²·Σ cos θ_k(i − j) under RoPE, which
    falls off with distance: attention starts local. ``embedding_std``: the standard deviation of every table of
    embeddings (`nn.Embedding`: tokens, tracks, what contexts hold; neither patches nor positions), drawn from N(0, 1)
    and scaled. Weights that their module starts at zero (a conditioned model's modulations and head) stay there.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.mul_(embedding_std)
        if not isinstance(module, nn.Linear):
            continue
        role = name.rsplit(".", 1)[-1]
        if role == "out":
            module.weight.mul_(1 / math.sqrt(num_branches))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
            if role == "qkv":
                module.bias[: 2 * module.in_features] = qk_bias
