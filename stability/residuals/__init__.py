"""Residual schemes, one file each.

``build("identity", width=64, layer=0)`` makes one connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings
from stability.config.impl import KernelUser
from stability.registry import Registry, import_on_use

if TYPE_CHECKING:
    from stability.residuals._streams import AbstractSinkhornStreams, AbstractStreams


__all__ = ["AbstractResidual", "AbstractSingleStream", "AbstractSinkhornStreams", "AbstractStreams", "build"]

Branch = Callable[[Tensor], Tensor]


class AbstractResidual(KernelUser, nn.Module):
    """One residual connection around a branch of a block.

    Each branch counts as a layer, as in Zhu et al. (2024) and Xie et al. (2025). In block b, the mixer's connection has
    number 2b and the feed-forward one 2b + 1. With cross branches the numbers are 3b (mixer), 3b + 1 (cross) and 3b + 2
    (feed-forward).

    Args:
        config: settings of the scheme.
        width: the model's width D.
        layer: the connection's number in the model, from 0. It sets the first stream of schemes with several streams.
    """

    family: ClassVar[str] = "residuals"
    Config: ClassVar[type[Settings]]

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__()

    @classmethod
    def evaluations(cls, config: Any) -> int:
        """Return the number of branch evaluations in one forward pass of a connection.

        The cost of the branch is multiplied by it.
        """
        return 1

    @property
    def own_decay(self) -> dict[str, bool]:
        """Whether weight decay applies, for parameters decided by the scheme, not the optimizer.

        The keys are parameter names.
        """
        return {}

    def enter(self, x_BND: Tensor) -> Tensor:
        """Return the state before the first block."""
        raise NotImplementedError

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        raise NotImplementedError

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        """Return the head's input, (B, N, D)."""
        raise NotImplementedError


class AbstractSingleStream(AbstractResidual):
    """A connection with one vector per token as its state, (B, N, D).

    This is the state of a plain transformer.
    """

    def enter(self, x_BND: Tensor) -> Tensor:
        return x_BND

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        return final_norm(state)


def build(name: str, *, width: int, layer: int = 0, **settings: Any):
    """Return one connection as a module, ``forward(state, branch) -> state``.

    Args:
        name: name of the scheme's file.
        width: the model's width D.
        layer: the connection's number in the model, from 0.
        **settings: fields of the scheme's Config.
    """
    from stability.config.parts import validate_settings

    return Registry("residuals").load(name)(validate_settings("residuals", name, settings), width=width, layer=layer)


# of schemes with several streams
__getattr__ = import_on_use(__name__, {"AbstractSinkhornStreams": "_streams", "AbstractStreams": "_streams"})
