"""General form of self-consensus: any directed edges, by gather and scatter-add.

It follows Algorithm 1, line 8, literally.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability.mechanisms._graphs import Edges
from stability.mechanisms._rotation import cos_sin, rotate
from stability.models.position import Rope


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
