"""Normalise before each branch: the sweep axis ``norm``."""

from __future__ import annotations

from torch import nn

EPSILON = 1e-5


def build_norm(name: str, width: int) -> nn.Module:
    """Return a LayerNorm (affine) or RMSNorm (gain) over the last axis of width D."""
    return {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[name](width, eps=EPSILON)
