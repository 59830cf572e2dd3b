"""Tokens are embedded by a table of their own width, and a linear map to the model's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FactorisedEmbedding(nn.Module):
    """Tokens (B, N) → (B, N, D): row e of a table of width E, then P e + b (Lan et al. 2020, ALBERT, arXiv:1909.11942,
    3.1): V·E + E·D weights where one table has V·D."""

    def __init__(self, table: nn.Module, inner_width: int, width: int):
        super().__init__()
        self.table, self.projection = table, nn.Linear(inner_width, width)

    @property
    def weight(self) -> Tensor:
        """The matrix (V, D) of which a token takes its row, without b: what a tied head reads with."""
        table: Any = self.table  # its weight is no parameter while others stand in for it (functional_call)
        return table.weight @ self.projection.weight.T

    def forward(self, tokens_BN: Tensor) -> Tensor:
        return self.projection(self.table(tokens_BN))
