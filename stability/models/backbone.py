"""The pre-norm transformer around any mechanism, residual scheme and norm."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from stability.models.block import Block


class Backbone(nn.Module):
    """Tokens (B, N) → logits (B, N, V): embedding, blocks, final norm, linear head. Positions enter inside the mixers (RoPE)."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int, blocks: list[Block], final_norm: nn.Module):
        super().__init__()
        self.embedding = nn.Embedding(num_inputs, width)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.head = nn.Linear(width, num_outputs)

    def forward(self, tokens_BN: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        residual: Any = cast(Block, self.blocks[0]).mixer_residual
        state = residual.enter(self.embedding(tokens_BN))
        for block in self.blocks:
            state = block(state, mask_BN)
        return self.head(residual.leave(state, self.final_norm))


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
