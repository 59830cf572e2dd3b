"""Norms, one file each. ``build("layernorm", width=64)`` makes one."""

from __future__ import annotations

from typing import Any

from stability.norms._base import AbstractNorm

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
