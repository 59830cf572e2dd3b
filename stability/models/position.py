"""Rotary position embedding (Su et al. 2021) in its half-split form.

Source: the consensus paper's appendix C.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rope(
    u: Tensor, *, position_dim: int = -2, width_dim: int = -1, base: float = 10_000.0, back: bool = False
) -> Tensor:
    """Return u rotated by its positions (rotary position embedding).

    ũ = u ⊙ cos θ(p) + (P u) ⊙ sin θ(p), θ(p)_k = p·base^(−2k/K), P u = [−second half; first half] (paper C.3, Eqs.
    41–42).

    Args:
        u: any shape.
        position_dim: axis of the positions p = 0, 1, ….
        width_dim: axis of the head width K; K must be even.
        base: base of the angles.
        back: rotate by −θ(p): the transpose, equal to the inverse.

    Returns:
        ũ in u's dtype; angles are computed in float32 or wider.

    Raises:
        ValueError: K is odd.
    """
    # Nothing is cached: a table made inside a functional transform or under inference mode must not outlive it, and
    # making it costs less than 1 % of a layer.
    cos, sin = _cos_sin(u, position_dim, width_dim, base)
    if back:
        sin = -sin
    first, second = u.chunk(2, dim=width_dim)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=width_dim)
    return turned if turned.dtype == u.dtype else turned.to(u.dtype)


@dataclass(frozen=True)
class Rope:
    """The rotation of a run's mixers: `rope` with the run's ``base``."""

    base: float = 10_000.0

    def __call__(self, u: Tensor, *, position_dim: int = -2, width_dim: int = -1, back: bool = False) -> Tensor:
        return rope(u, position_dim=position_dim, width_dim=width_dim, base=self.base, back=back)


def _cos_sin(u: Tensor, position_dim: int, width_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos θ and sin θ of K/2 angles per position, broadcastable to half ``u``."""
    width = u.shape[width_dim]
    if width % 2:
        raise ValueError(
            f"RoPE turns pairs: the head width must be even, got {width}; choose heads so that width / heads is even"
        )
    wide = torch.promote_types(u.dtype, torch.float32)
    position = torch.arange(u.shape[position_dim], dtype=wide, device=u.device)
    rate = base ** (-torch.arange(0, width, 2, dtype=wide, device=u.device) / width)
    angle = _along(position, position_dim, u.ndim) * _along(rate, width_dim, u.ndim)
    return angle.cos(), angle.sin()


def _along(values: Tensor, dim: int, ndim: int) -> Tensor:
    shape = [1] * ndim
    shape[dim] = values.shape[0]
    return values.reshape(shape)
