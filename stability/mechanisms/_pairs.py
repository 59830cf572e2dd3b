"""Edges of self-consensus: any directed ones by gather and scatter-add (Algorithm 1, line 8, literally), or pairs.

Pairs {i, j = i + offset}, by slices, are the fast form for window and complete graphs. Both directed edges in a pair
(T: 0 is i → j, 1 is j → i) share the disagreement u_i − u_j, and the update moves both ends in opposite directions.
Relative disagreements, ρ(i − j)u_i − u_j and ρ(j − i)u_j − u_i, are ũ_i − ũ_j rotated back by j and by i, the second
with opposite sign. The update then moves the ends by R_ij times the first plus R_ji times the second.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from stability.mechanisms._graphs import Edges
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


class Pairs:
    """Pairs {i, i + offset} for offsets 1 … w (Definition 3.1).

    w = N − 1 is the complete graph. ``relative``: rotation ρ for disagreements ρ(i − j)u_i − u_j; None for u_i − u_j.
    """

    def __init__(
        self, window: int, batch: int, num_positions: int, mask_BN: Tensor | None, relative: Rope | None = None
    ):
        self.offsets = range(1, min(window, num_positions - 1) + 1)
        self.lengths = [num_positions - offset for offset in self.offsets]
        self.shape = (batch, sum(self.lengths))
        self.mask_BN, self.relative = mask_BN, relative

    def sums(self, source_HXBN: Tensor, target_HXBN: Tensor) -> Tensor:
        """Return the sum of source part and target part for both edges per pair, (H, T, X, B·P)."""
        node_HTXBN = torch.stack([source_HXBN, target_HXBN], 1)
        return self._add_on_pairs(node_HTXBN, node_HTXBN.flip(1)).flatten(-2)

    def differences(self, u_HKBN: Tensor) -> Tensor:
        """Return the disagreement per pair, (H, 1, K, B, P), or per direction, (H, T, K, B, P)."""
        if self.relative is None:
            return self._add_on_pairs(u_HKBN, -u_HKBN)[:, None]
        cos, sin = exact_cos_sin(u_HKBN, u_HKBN.shape[-1], self.relative)
        turned_HKBN = rotate(u_HKBN, cos[:, None], sin[:, None])
        difference_HKBP = self._add_on_pairs(turned_HKBN, -turned_HKBN)
        cos, sin = (torch.stack([self._take_j(table), self._take_i(table)])[:, :, None] for table in (cos, sin))
        return rotate_back(difference_HKBP[:, None], cos, sin, dim=2)

    def collect(self, flow_HKBP: Tensor) -> Tensor:
        """Return g, (…, N): each pair's flow added at i, subtracted at j.

        Pairs with a padded end contribute nothing.
        """
        flows = self._split_by_offset(flow_HKBP)
        return torch.stack([F.pad(flow, (0, offset)) - F.pad(flow, (offset, 0)) for offset, flow in flows]).sum(0)

    def degrees(self, weight_HBP: Tensor) -> Tensor:
        """Return the sum over each node's pairs, (H, B, N).

        Pairs with a padded end contribute nothing.
        """
        weights = self._split_by_offset(weight_HBP)
        return torch.stack([F.pad(part, (0, offset)) + F.pad(part, (offset, 0)) for offset, part in weights]).sum(0)

    def _split_by_offset(self, of_pairs: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Return each offset with its pairs' numbers, (…, B, N − offset); 0 at padded ends."""
        if self.mask_BN is not None:
            of_pairs = of_pairs * torch.cat(
                [self.mask_BN[:, :-offset] & self.mask_BN[:, offset:] for offset in self.offsets], -1
            )
        return zip(self.offsets, of_pairs.split(self.lengths, -1), strict=True)

    def list_directed(self, r_BHEKK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources and targets for the T·P directed edges, and R unchanged."""
        num_positions = self.lengths[0] + 1
        left_P = torch.cat([torch.arange(num_positions - offset, device=r_BHEKK.device) for offset in self.offsets])
        right_P = torch.cat([torch.arange(offset, num_positions, device=r_BHEKK.device) for offset in self.offsets])
        return torch.cat([left_P, right_P]), torch.cat([right_P, left_P]), r_BHEKK

    def _take_i(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., :-offset] for offset in self.offsets], -1)

    def _take_j(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., offset:] for offset in self.offsets], -1)

    def _add_on_pairs(self, at_i: Tensor, at_j: Tensor) -> Tensor:
        """Return at_i + at_j per pair: (…, N) → (…, P). Slices only, no gather."""
        return torch.cat([at_i[..., :-offset] + at_j[..., offset:] for offset in self.offsets], -1)


class EdgeList:
    """Directed edges i → j, each with R_ij.

    Out-edges add R_ij(u_i − u_j) to g_i; in-edges subtract R_ki(u_k − u_i). ``relative``: rotation ρ for disagreements
    ρ(i − j)u_i − u_j; None for u_i − u_j.
    """

    def __init__(self, edges: Edges, batch: int, num_positions: int, mask_BN: Tensor | None, relative: Rope | None):
        self.relative, self.num_positions, self.edges = relative, num_positions, edges
        self.shape = (batch, edges.source_BE.shape[1])
        first_B1 = torch.arange(batch, device=edges.source_BE.device)[:, None] * num_positions
        self.source_M, self.target_M = ((first_B1 + end_BE).flatten() for end_BE in (edges.source_BE, edges.target_BE))
        self.factor_BE = edges.factor(mask_BN)

    def sums(self, source_HXBN: Tensor, target_HXBN: Tensor) -> Tensor:
        """Return the sum of source part and target part per edge, (H, 1, X, B·E)."""
        return (_gather(source_HXBN, self.source_M) + _gather(target_HXBN, self.target_M))[:, None]

    def differences(self, u_HKBN: Tensor) -> Tensor:
        """Return the disagreement per edge, (H, 1, K, B, E)."""
        at_i_HKBE = _gather(u_HKBN, self.source_M).unflatten(-1, self.shape)
        if self.relative is not None:
            # ρ(i − j)u_i; the tables are indexed by |i − j|, and sin is odd
            distance_BE = self.edges.source_BE - self.edges.target_BE
            tables = cos_sin(at_i_HKBE, self.num_positions, self.relative)
            cos, sin = (table[:, distance_BE.abs()] for table in tables)
            at_i_HKBE = rotate(at_i_HKBE, cos, sin * distance_BE.sign())
        return (at_i_HKBE - _gather(u_HKBN, self.target_M).unflatten(-1, self.shape))[:, None]

    def collect(self, flow_HKBE: Tensor) -> Tensor:
        """Return g, (…, N): each edge's flow added at its source, subtracted at its target."""
        return self._add_at_ends(flow_HKBE, -1)

    def degrees(self, weight_HBE: Tensor) -> Tensor:
        """Return the sum over each node's out-edges and in-edges, (H, B, N)."""
        return self._add_at_ends(weight_HBE, 1)

    def _add_at_ends(self, of_edges: Tensor, sign: int) -> Tensor:
        """Return (…, B, N): each edge's number added at its source, times ``sign`` at its target."""
        if self.factor_BE is not None:
            of_edges = of_edges * self.factor_BE
        flat = of_edges.flatten(-2)
        nodes = flat.new_zeros((*flat.shape[:-1], self.shape[0] * self.num_positions))
        nodes = nodes.index_add(-1, self.source_M, flat).index_add(-1, self.target_M, sign * flat)
        return nodes.unflatten(-1, (self.shape[0], self.num_positions))

    def list_directed(self, r_BHEKK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources, targets and R (times the gate) for the existing edges.

        Raises:
            ValueError: edges differ within the batch.
        """
        if len(self.edges.source_BE) > 1:
            raise ValueError(
                f"each of the {self.shape[0]} sequences has edges of its own; give edge_weights one sequence at a time"
            )
        if self.factor_BE is not None:
            r_BHEKK = r_BHEKK * self.factor_BE[:, None, :, None, None]
        kept_E = slice(None) if self.edges.kept_BE is None else self.edges.kept_BE[0]
        return self.edges.source_BE[0][kept_E], self.edges.target_BE[0][kept_E], r_BHEKK[:, :, kept_E]


def _gather(at_nodes: Tensor, index_M: Tensor) -> Tensor:
    """Gather (…, B, N) at the ends of edges: (…, M)."""
    return at_nodes.flatten(-2).index_select(-1, index_M)
