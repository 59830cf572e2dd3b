"""Rotate by RoPE at chosen positions, where `rope` counts them from 0: the distances of edges, the rows of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.models.position import Rope


def cos_sin(u_HKBN: Tensor, num_positions: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return cos θ(p) and sin θ(p) of the positions 0 … ``num_positions`` − 1, (K/2, N) each. `rope` itself gives them:
    it turns [1; 0] into [cos; sin]."""
    unit_K = (torch.arange(u_HKBN.shape[1], device=u_HKBN.device) < u_HKBN.shape[1] // 2).to(u_HKBN.dtype)
    unit_KN = unit_K[:, None].expand(-1, num_positions)
    cos, sin = rope(unit_KN, position_dim=1, width_dim=0).chunk(2)
    return cos, sin


def turned(u_HKBP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return u ⊙ cos + (P u) ⊙ sin (Eq. 42); the angles broadcast against half of u along K."""
    first, second = u_HKBP.chunk(2, dim=1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)
