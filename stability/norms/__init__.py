"""Norms, one file each. ``build("layernorm", width=64)`` makes one.

A norm precedes each branch and the head, and scales their inputs to one size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings

__all__ = ["AbstractNorm", "build"]


def build(name: str, *, width: int, **settings: Any):
    """Return one norm as a module, ``forward(x_BND) -> y_BND``.

    Args:
        name: name of the norm's file.
        width: the model's width D.
        **settings: fields of the norm's Config.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    return Registry("norms").load(name).build(validate_settings("norms", name, settings), width)


class AbstractNorm(nn.Module):
    """Base of every norm over the last axis, (…, D) → (…, D).

    A subclass is constructed as ``cls(config, width)`` with its own settings and the model's width D.
    """

    family: ClassVar[str] = "norms"
    Config: ClassVar[type[Settings]]

    @classmethod
    def build(cls, config: Any, width: int) -> AbstractNorm:
        return cls(config, width)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError
