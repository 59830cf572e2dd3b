"""RoPE at chosen positions (`rope` itself counts from 0): edge ends, edge distances, block rows."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.models.position import Rope


def cos_sin(u_HKBN: Tensor, num_positions: int, rope: Rope, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return cos θ(p) and sin θ(p) for positions 0 … ``num_positions`` − 1, (K/2, N) each.

    Args:
        u_HKBN: signal, for K, device and dtype.
        num_positions: N.
        rope: the rotation.
        dtype: the result's; None for that of ``u_HKBN``.
    """
    # `rope` turns [1; 0] into [cos; sin]
    width = u_HKBN.shape[1]
    unit_K = (torch.arange(width, device=u_HKBN.device) < width // 2).to(dtype or u_HKBN.dtype)
    unit_KN = unit_K[:, None].expand(-1, num_positions)
    cos, sin = rope(unit_KN, position_dim=1, width_dim=0).chunk(2)
    return cos, sin


def exact_cos_sin(u_HKBN: Tensor, num_positions: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return `cos_sin` from float64 angles, in float32 or wider.

    Rotations by i and back by j then equal one by i − j up to rounding of the tables. Angles in float32 are off by 6e-8
    times the position.

    Args:
        u_HKBN: signal, for K, device and dtype.
        num_positions: N.
        rope: the rotation.
    """
    wide = torch.promote_types(u_HKBN.dtype, torch.float32)
    cos, sin = cos_sin(u_HKBN, num_positions, rope, torch.float64)
    return cos.to(wide), sin.to(wide)


def turn_of_kernels(cos: Tensor, sin: Tensor) -> Tensor:
    """Return [cos; cos] and [−sin; sin], (2, K, N), the rotation format in `kernels.consensus`."""
    return torch.stack([torch.cat([cos, cos]), torch.cat([-sin, sin])])


def rotate(u_HKBP: Tensor, cos: Tensor, sin: Tensor, *, dim: int = 1) -> Tensor:
    """Return u ⊙ cos + (P u) ⊙ sin (Eq. 42).

    Args:
        u_HKBP: signal.
        cos: broadcasts against half of ``u_HKBP`` along K.
        sin: like ``cos``.
        dim: the axis K.
    """
    first, second = u_HKBP.chunk(2, dim=dim)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim)


def rotate_back(u_HKBP: Tensor, cos: Tensor, sin: Tensor, *, dim: int = 1) -> Tensor:
    """Return the inverse of `rotate`.

    Args:
        u_HKBP: signal.
        cos: as in `rotate`.
        sin: as in `rotate`.
        dim: the axis K.
    """
    return rotate(u_HKBP, cos, -sin, dim=dim)
