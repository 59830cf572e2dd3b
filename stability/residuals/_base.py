"""A residual scheme says how a branch's output joins the state that runs through the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings
from stability.config.impl import KernelUser

Branch = Callable[[Tensor], Tensor]


class AbstractResidual(KernelUser, nn.Module):
    """One connection around a branch of a block. ``layer``: its number among the model's connections, from 0 (schemes
    with several streams start from it).

    A branch is a layer of its own, as Zhu et al. (2024) and Xie et al. (2025) count: of block b the mixer's connection
    has number 2b and the feed-forward one 2b + 1; with cross branches they have 3b and 3b + 2, and the cross branch's
    3b + 1.
    """

    family: ClassVar[str] = "residuals"
    Config: ClassVar[type[Settings]]

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__()

    @classmethod
    def evaluations(cls, config: Any) -> int:
        """Return how often a connection evaluates its branch in one forward pass; what the branch costs counts so
        often."""
        return 1

    @property
    def own_decay(self) -> dict[str, bool]:
        """The parameters by name of which the scheme, not the optimizer, says whether weight decay reaches them."""
        return {}

    def enter(self, x_BND: Tensor) -> Tensor:
        """Return the state before the first block."""
        raise NotImplementedError

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        raise NotImplementedError

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        """Return what the head reads, (B, N, D)."""
        raise NotImplementedError


class AbstractSingleStream(AbstractResidual):
    """A connection whose state is what runs through a plain transformer, one vector per token, (B, N, D)."""

    def enter(self, x_BND: Tensor) -> Tensor:
        return x_BND

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        return final_norm(state)
