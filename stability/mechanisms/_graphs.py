"""Build edge sets for self-consensus as edge lists; check edges from a caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Edges:
    """Directed edges source → target; one row serves a whole batch with equal edges.

    Attributes:
        source_BE: source positions, (B, E).
        target_BE: target positions, (B, E).
        kept_BE: False for filler; None if all entries are edges.
        gate_BE: factor on each edge's R; None if all are 1.
    """

    source_BE: Tensor
    target_BE: Tensor
    kept_BE: Tensor | None = None
    gate_BE: Tensor | None = None

    def factor(self, mask_BN: Tensor | None) -> Tensor | None:
        """Return the factor on each edge's flow, or None if all are 1.

        It is 0 for filler and padded ends, else the gate.
        """
        kept_BE = self.kept_BE
        if mask_BN is not None:
            ends = (mask_BN.gather(1, end_BE.expand(len(mask_BN), -1)) for end_BE in (self.source_BE, self.target_BE))
            kept_BE = torch.stack([*ends, *(() if kept_BE is None else (kept_BE.expand(len(mask_BN), -1),))]).all(0)
        if self.gate_BE is None or kept_BE is None:
            return kept_BE if self.gate_BE is None else self.gate_BE
        return self.gate_BE * kept_BE


def cycle_edges(window: int, num_positions: int, device: torch.device) -> Edges:
    """Return the edges of C_N^w: i → i ± 1, …, i ± w modulo N (Remark 4.1).

    If 2w + 1 ≥ N this is the complete graph, without double edges.

    Args:
        window: w.
        num_positions: N.
        device: device for the result.
    """
    position_N = torch.arange(num_positions, device=device)
    ahead_NN = (position_N - position_N[:, None]) % num_positions
    return _list_edges((ahead_NN > 0) & ((ahead_NN <= window) | (ahead_NN >= num_positions - window)))


def top_edges(score_BNN: Tensor, num_chosen: int, mask_BN: Tensor | None) -> Edges:
    """Choose for each node i the valid j ≠ i with the largest scores s_ij.

    The choice is hard. Its gradient reaches the chosen scores through the gate 2σ(s_ij), which is 1 at s = 0. With the
    choice fixed, everything is smooth. Padded nodes neither choose nor are chosen.

    Args:
        score_BNN: s.
        num_chosen: edges per node; fewer if fewer nodes are valid.
        mask_BN: True at valid positions; None without padding.
    """
    num_positions = score_BNN.shape[-1]
    allowed_BNN = ~torch.eye(num_positions, dtype=torch.bool, device=score_BNN.device).expand(score_BNN.shape)
    if mask_BN is not None:
        allowed_BNN = allowed_BNN & mask_BN[:, :, None] & mask_BN[:, None]
    chosen_BNW = score_BNN.masked_fill(~allowed_BNN, -torch.inf).topk(min(num_chosen, num_positions - 1), -1).indices
    source_BNW = torch.arange(num_positions, device=score_BNN.device)[:, None].expand_as(chosen_BNW)
    gate_BNW = 2 * torch.sigmoid(score_BNN.gather(-1, chosen_BNW))
    return Edges(
        source_BNW.flatten(1), chosen_BNW.flatten(1), allowed_BNN.gather(-1, chosen_BNW).flatten(1), gate_BNW.flatten(1)
    )


def convert_edges(edges: Tensor, batch: int, num_positions: int, device: torch.device) -> Edges:
    """Check a caller's edges and convert them to `Edges`.

    Self-loops are dropped (they contribute nothing).

    Args:
        edges: int64 (E, 2) or (B, E, 2), with rows [-1, -1] as filler; or a boolean adjacency (N, N) or (B, N, N), True
            at [i, j] for i → j.
        batch: B.
        num_positions: N.
        device: device for the result.

    Raises:
        ValueError: not a tensor, wrong shape or dtype, position out of range, or an edge given twice; one line.
    """
    if not isinstance(edges, Tensor):
        raise ValueError(
            f"edges must be a tensor, got {type(edges).__name__}; e.g. torch.tensor([[0, 1]]) for one edge 0 → 1"
        )
    rows = (batch,) if edges.ndim == 3 else ()
    adjacency = edges.dtype == torch.bool and tuple(edges.shape) == (*rows, num_positions, num_positions)
    if not adjacency and not (
        edges.dtype == torch.int64 and edges.ndim in (2, 3) and tuple(edges.shape) == (*rows, edges.shape[-2], 2)
    ):
        expected = (
            f"int64 (E, 2) or ({batch}, E, 2), or bool ({num_positions}, {num_positions}) or ({batch}, "
            f"{num_positions}, {num_positions})"
        )
        raise ValueError(
            f"edges has dtype {str(edges.dtype).removeprefix('torch.')} and shape {tuple(edges.shape)}; expected "
            f"{expected}"
        )
    edges = edges.to(device)
    return _list_edges(edges) if adjacency else _check_edges(edges if edges.ndim == 3 else edges[None], num_positions)


def _list_edges(adjacency: Tensor) -> Edges:
    """List an adjacency's edges by row, with filler after shorter rows."""
    adjacency_BNN = adjacency if adjacency.ndim == 3 else adjacency[None]
    adjacency_BNN = adjacency_BNN & ~torch.eye(adjacency.shape[-1], dtype=torch.bool, device=adjacency.device)
    if len(adjacency_BNN) == 1:
        source_E, target_E = adjacency_BNN[0].nonzero().unbind(1)
        return Edges(source_E[None], target_E[None])
    row_M, source_M, target_M = adjacency_BNN.nonzero().unbind(1)
    count_B = adjacency_BNN.sum((1, 2))
    place_M = torch.arange(len(row_M), device=row_M.device) - (count_B.cumsum(0) - count_B)[row_M]
    empty_BE = row_M.new_zeros(len(count_B), int(count_B.max()))
    source_BE, target_BE = (empty_BE.index_put((row_M, place_M), end_M) for end_M in (source_M, target_M))
    return Edges(source_BE, target_BE, torch.arange(empty_BE.shape[1], device=row_M.device) < count_B[:, None])


def _check_edges(edges_BE2: Tensor, num_positions: int) -> Edges:
    """Return edges (B, E, 2) as `Edges` without self-loops and filler.

    Raises:
        ValueError: position out of range, or an edge given twice.
    """
    source_BE, target_BE = edges_BE2.unbind(-1)
    filler_BE = (edges_BE2 == -1).all(-1)
    wrong_BE = ((edges_BE2 < 0) | (edges_BE2 >= num_positions)).any(-1) & ~filler_BE
    if wrong_BE.any():
        raise ValueError(
            f"edges holds {edges_BE2[wrong_BE][0].tolist()}; positions go from 0 to {num_positions - 1} ([-1, -1] is "
            "filler)"
        )
    row_B1 = torch.arange(len(edges_BE2), device=edges_BE2.device)[:, None]
    number_M, count_M = ((row_B1 * num_positions + source_BE) * num_positions + target_BE)[~filler_BE].unique(
        return_counts=True
    )
    if (count_M > 1).any():
        double = int(number_M[count_M > 1][0])
        raise ValueError(
            f"edges holds {[double // num_positions % num_positions, double % num_positions]} twice; give each "
            "directed edge once"
        )
    kept_BE = ~filler_BE & (source_BE != target_BE)
    return Edges(source_BE.clamp(min=0), target_BE.clamp(min=0), None if kept_BE.all() else kept_BE)
