"""Initial weights, the same rule for every mechanism."""

from __future__ import annotations

import math

import torch
from torch import nn

EMBEDDING_STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int) -> None:
    """Scale what the modules' own constructors drew: small embeddings, and branch outputs by 1/√(2L) (Radford et al. 2019).

    A branch's last projection is the module called ``out``; with 2L branches the residual stream then keeps its size through depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        if name.rsplit(".", 1)[-1] == "out" and isinstance(module, nn.Linear):
            module.weight.mul_(1 / math.sqrt(2 * num_layers))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
