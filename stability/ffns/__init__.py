"""Feed-forward networks, one file each; ``build("glu", width=64)`` makes one."""

from __future__ import annotations

from typing import Any

from stability.ffns._base import AbstractFeedForward
from stability.models.auxiliary import WithLoss
from stability.models.precision import at_least_float32

__all__ = ["AbstractFeedForward", "WithLoss", "at_least_float32", "build"]


def build(name: str, *, width: int, ffn_multiple: float = 4.0, **settings: Any):
    """Return one feed-forward network as a module: ``forward(x_BND) -> y_BND``.

    Args:
        name: the network's name, e.g. "glu".
        width: D.
        ffn_multiple: the model's hidden width in widths D.
        settings: fields of the network's Config.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    return Registry("ffns").load(name).build(validate_settings("ffns", name, settings), width, ffn_multiple)
