"""Embed tokens by a narrower table and a linear map to the model's width."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FactorisedEmbedding(nn.Module):
    """Tokens (B, N) → (B, N, D) by a table of width E.

    Token e gives row e, then P e + b (Lan et al. 2020, ALBERT, arXiv:1909.11942, 3.1). It has V·E + E·D weights; a
    single table has V·D.
    """

    def __init__(self, table: nn.Module, inner_width: int, width: int):
        super().__init__()
        self.table, self.projection = table, nn.Linear(inner_width, width)

    @property
    def weight(self) -> Tensor:
        """The effective table (V, D) without b, used by a tied head."""
        table: Any = self.table  # under functional_call its weight is a plain tensor, not a parameter
        return table.weight @ self.projection.weight.T

    def forward(self, tokens_BN: Tensor) -> Tensor:
        return self.projection(self.table(tokens_BN))
