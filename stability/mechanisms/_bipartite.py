"""Edge sets for cross-consensus, from source positions i to context positions j (paper C.1).

Edges are all pairs, or those in a window. ``rows`` are the covered source positions, so that a caller can process a
long sequence in blocks. Edges are the last axis in every tensor: P per sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class WindowedEdges:
    """Edges i → j for |i − j| ≤ w, j = i included, with equal lengths (Eq. 38).

    They are computed per offset, with slices only.
    """

    def __init__(self, window: int, num_positions: int):
        reach = min(window, num_positions - 1)
        self.rows = slice(0, num_positions)
        self.sources, self.targets = (
            [slice(max(0, sign * offset), num_positions + min(0, sign * offset)) for offset in range(-reach, reach + 1)]
            for sign in (-1, 1)
        )
        self.lengths = [source.stop - source.start for source in self.sources]
        self.num_edges = sum(self.lengths)

    def sums(self, at_rows: Tensor, at_context: Tensor) -> Tensor:
        """Return at_rows + at_context for each edge, (…, P)."""
        return torch.cat(
            [at_rows[..., i] + at_context[..., j] for i, j in zip(self.sources, self.targets, strict=True)], -1
        )

    def gather_at_targets(self, at_context: Tensor) -> Tensor:
        """Return the context's value at each edge's target, (…, P)."""
        return torch.cat([at_context[..., j] for j in self.targets], -1)

    def collect(self, flow: Tensor) -> Tensor:
        """Return the sum over each row's edges, (…, N)."""
        flows = zip(self.sources, flow.split(self.lengths, -1), strict=True)
        return torch.stack([F.pad(part, (i.start, self.rows.stop - i.stop)) for i, part in flows]).sum(0)


class CompleteEdges:
    """All edges i → j from source positions ``first`` … ``last`` − 1 to ``num_context`` entries."""

    def __init__(self, first: int, last: int, num_context: int):
        self.rows, self.num_context = slice(first, last), num_context
        self.num_rows = last - first
        self.num_edges = self.num_rows * num_context

    def sums(self, at_rows: Tensor, at_context: Tensor) -> Tensor:
        """Return at_rows + at_context for each edge, (…, P)."""
        return (at_rows[..., None] + at_context[..., None, :]).flatten(-2)

    def gather_at_targets(self, at_context: Tensor) -> Tensor:
        """Return the context's value at each edge's target, (…, P)."""
        return at_context[..., None, :].expand(*at_context.shape[:-1], self.num_rows, -1).flatten(-2)

    def collect(self, flow: Tensor) -> Tensor:
        """Return the sum over each row's edges, (…, last − first)."""
        return flow.unflatten(-1, (self.num_rows, self.num_context)).sum(-1)
