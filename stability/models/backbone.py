"""The pre-norm transformer around any mechanism, residual scheme and norm."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from stability.models.block import Block, Context


class Backbone(nn.Module):
    """Tokens (B, N) → logits (B, N, V): embedding, blocks, final norm, linear head. Positions enter inside the mixers (RoPE).

    With cross branches in the blocks, context tokens (B, J) are embedded by the same embedding and normed once: every block reads the same context, on
    the scale of the normed source that it is compared with.
    """

    def __init__(self, num_inputs: int, num_outputs: int, width: int, blocks: list[Block], final_norm: nn.Module, context_norm: nn.Module | None = None):
        super().__init__()
        self.embedding = nn.Embedding(num_inputs, width)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.head = nn.Linear(width, num_outputs)
        self.context_norm = context_norm

    def forward(
        self, tokens_BN: Tensor, mask_BN: Tensor | None = None, *, context_BJ: Tensor | None = None, context_mask_BJ: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """``context_BJ``: context tokens, needed exactly where there are cross branches; masks: True where a token is valid.

        ``inputs``: what mixers take besides, e.g. ``edges=`` for ``sc`` with ``graph=given``. Errors: ``ValueError`` for a context that is missing or that
        nothing reads, and for an input that no mixer takes.
        """
        context = self._context(context_BJ, context_mask_BJ)
        if inputs:
            self._check(inputs)
        residual: Any = cast(Block, self.blocks[0]).mixer_residual
        state = residual.enter(self.embedding(tokens_BN))
        for block in self.blocks:
            state = block(state, mask_BN, context, inputs)
        return self.head(residual.leave(state, self.final_norm))

    def _context(self, context_BJ: Tensor | None, context_mask_BJ: Tensor | None) -> Context | None:
        if self.context_norm is None:
            if context_BJ is not None or context_mask_BJ is not None:
                raise ValueError("context_BJ and context_mask_BJ are read by a cross mechanism only, and this model has none; build it with cross=auto")
            return None
        if context_BJ is None:
            raise ValueError("this model's cross mechanism needs a context; give context_BJ=, the context's tokens")
        return Context(self.context_norm(self.embedding(context_BJ)), context_mask_BJ)

    def _check(self, inputs: dict[str, Any]) -> None:
        taken = frozenset().union(*(cast(Block, block).mixer_inputs for block in self.blocks))
        if unread := sorted(set(inputs) - taken):
            raise ValueError(f"{unread[0]}=: no mixer of this model takes it (edges= belongs to mechanism=sc with graph=given)")


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
