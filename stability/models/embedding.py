"""Embed tokens by a narrower table and a linear map, mix the embeddings of neighbours, and pool positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class EmbeddingConvolution(nn.Module):
    """Convolution of embedded inputs over k positions, (B, N, D) → (B, N, D), before the first block.

    y_t = Σ_j W_j x_{t−j} with 0 ≤ j < k (causal) or |j| ≤ (k − 1)/2; x_t + y_t if residual. Outside the sequence and at
    padding x is 0. The weights of all offsets are one linear map without bias, from the earliest position to the
    latest.

    Args:
        width: D.
        size: k, odd unless causal.
        is_causal: whether no position reads a later one.
        is_residual: whether the result is added to the embedding rather than replacing it.
    """

    def __init__(self, width: int, size: int, is_causal: bool, is_residual: bool):
        super().__init__()
        self.size, self.num_before, self.is_residual = size, size - 1 if is_causal else size // 2, is_residual
        self.linear = nn.Linear(size * width, width, bias=False)

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        if mask_BN is not None:
            x_BND = torch.where(mask_BN[..., None], x_BND, 0.0)  # not a product: 0 · NaN is NaN
        num = x_BND.shape[1]
        padded_BPD = F.pad(x_BND, (0, 0, self.num_before, self.size - 1 - self.num_before))
        y_BND = self.linear(torch.cat([padded_BPD[:, start : start + num] for start in range(self.size)], -1))
        return x_BND + y_BND if self.is_residual else y_BND


def first_position(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the first position, a class token, (B, 1, D)."""
    return hidden_BND[:, :1]


def mean_over_positions(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the mean over the valid positions (without a mask: all), (B, 1, D)."""
    if mask_BN is None:
        return hidden_BND.mean(1, keepdim=True)
    weights_BN1 = (mask_BN / mask_BN.sum(1, keepdim=True))[..., None].to(hidden_BND.dtype)
    return (hidden_BND.where(mask_BN[..., None], 0.0) * weights_BN1).sum(1, keepdim=True)


def max_over_positions(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return each dimension's maximum over the valid positions (without a mask: all), (B, 1, D)."""
    if mask_BN is not None:
        lowest = torch.finfo(hidden_BND.dtype).min
        hidden_BND = hidden_BND.masked_fill(~mask_BN[..., None], lowest)
    return hidden_BND.amax(1, keepdim=True)
