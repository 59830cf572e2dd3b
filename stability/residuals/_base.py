"""What a residual scheme is: how a branch's output joins the state that runs through the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings

Branch = Callable[[Tensor], Tensor]


class AbstractResidual(nn.Module):
    """One connection. ``layer`` counts the connections' blocks from 0 (schemes with several streams start from it)."""

    family: ClassVar[str] = "residuals"
    Config: ClassVar[type[Settings]]

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__()

    def enter(self, x_BND: Tensor) -> Tensor:
        """The state before the first block."""
        raise NotImplementedError

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        raise NotImplementedError

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        """What the head reads, (B, N, D)."""
        raise NotImplementedError
