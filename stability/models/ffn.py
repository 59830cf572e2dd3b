"""The position-wise branch of a block."""

from __future__ import annotations

from torch import Tensor, nn


class FeedForward(nn.Module):
    """GELU MLP, (B, N, D) → (B, N, D), hidden width ``multiple``·D."""

    def __init__(self, width: int, multiple: float):
        super().__init__()
        hidden = round(width * multiple)
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.hidden(x_BND)))
