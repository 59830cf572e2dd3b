"""Residual schemes, one file each.

``build("identity", width=64, layer=0)`` makes one connection.
"""

from __future__ import annotations

from typing import Any

from stability.residuals._base import AbstractResidual, AbstractSingleStream
from stability.residuals._streams import AbstractSinkhornStreams, AbstractStreams

__all__ = ["AbstractResidual", "AbstractSingleStream", "AbstractSinkhornStreams", "AbstractStreams", "build"]


def build(name: str, *, width: int, layer: int = 0, **settings: Any):
    """Return one connection as a module, ``forward(state, branch) -> state``.

    Args:
        name: name of the scheme's file.
        width: the model's width D.
        layer: the connection's number in the model, from 0.
        **settings: fields of the scheme's Config.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    return Registry("residuals").load(name)(validate_settings("residuals", name, settings), width=width, layer=layer)
