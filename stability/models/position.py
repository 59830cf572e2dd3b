"""Rotary position embedding (Su et al. 2021) in its half-split form, and hyperbolic decays.

Source of the former: the consensus paper's appendix C.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # queries whose decays share an anchor


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


@dataclass(frozen=True)
class Decays:
    """The decays of a run's logits: HoPE (arXiv:2509.05218) in closed form.

    Pair c has the entries c and c + K/2, θ_c = base^(−2c/K), θ′ = damping·θ, and q± = (q₁ ± q₂)/√2, likewise k±. The
    product of q at m and k at n is Σ_c e^(−|m−n|(θ′−θ)) q₊k₊ + e^(−|m−n|(θ′+θ)) q₋k₋. θ′ ≥ θ bounds it.
    """

    base: float = 10_000.0
    damping: float = 1.0

    def __call__(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        """Return the products of all queries and keys, (B, H, N, N), in place of q·k."""
        wide = torch.promote_types(q_BHNK.dtype, torch.float32)
        width = q_BHNK.shape[-1]
        theta_C = self.base ** (-torch.arange(0, width, 2, dtype=wide, device=q_BHNK.device) / width)
        rate_K = torch.cat([(self.damping - 1) * theta_C, (self.damping + 1) * theta_C])
        return decayed_products(_sum_and_difference(q_BHNK), _sum_and_difference(k_BHNK), rate_K)


def _sum_and_difference(u_BHNK: Tensor) -> Tensor:
    first, second = u_BHNK.chunk(2, -1)
    return torch.cat([first + second, first - second], -1) / math.sqrt(2)


def decayed_products(q_BHNK: Tensor, k_BHNK: Tensor, rate_K: Tensor) -> Tensor:
    """Return Σ_c e^(−rate_c |i−j|) q_ic k_jc for all i and j, (B, H, N, N).

    A block of queries and the keys on one side of it are both decayed towards the edge between them, so that no
    exponent is positive; within a block the decays are those of each pair.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        rate_K: rates, not negative.
    """

    def decay(distance: Tensor) -> Tensor:
        return torch.exp(-distance[..., None] * rate_K)

    num, rows = q_BHNK.shape[-2], []
    place_N = torch.arange(num, dtype=rate_K.dtype, device=rate_K.device)
    for start in range(0, num, BLOCK):
        end = min(start + BLOCK, num)
        q_BHCK, own_BHCK, place_C = q_BHNK[..., start:end, :], k_BHNK[..., start:end, :], place_N[start:end]
        within_CCK = decay((place_C[:, None] - place_C).abs())
        parts = [(q_BHCK[..., None, :] * within_CCK * own_BHCK[..., None, :, :]).sum(-1)]
        if start:
            earlier = k_BHNK[..., :start, :] * decay(start - place_N[:start])
            parts.insert(0, (q_BHCK * decay(place_C - start)) @ earlier.mT)
        if end < num:
            later = k_BHNK[..., end:, :] * decay(place_N[end:] - end)
            parts.append((q_BHCK * decay(end - place_C)) @ later.mT)
        rows.append(torch.cat(parts, -1))
    return torch.cat(rows, -2)


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
