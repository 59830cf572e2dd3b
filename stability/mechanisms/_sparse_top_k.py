"""Project scores on the soft k-hot vectors, SparseK(u, k) = argmin ‖p − u‖² over 0 ≤ p ≤ 1, Σ p = k, for many prefixes
of one sequence at once (Lou et al. 2024, arXiv:2406.16747, Algorithm 1: p = clamp(u − τ, 0, 1))."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """The order of a sequence's scores, the best first and of equal ones the later: ``position`` of each place and
    ``place`` of each position, (B, H, N) both. It never depends on what two positions have between them, so one that
    has left the best k of a prefix is in no longer prefix's."""

    position: Int64[Tensor, "B H N"]
    place: Int64[Tensor, "B H N"]

    @classmethod
    def of(cls, u_BHN: Tensor) -> Ranking:
        position = u_BHN.shape[-1] - 1 - u_BHN.flip(-1).argsort(dim=-1, descending=True, stable=True)
        return cls(position, position.argsort(-1))


@dataclass(frozen=True)
class Thresholds:
    """Rows' thresholds τ, and which rows have no more than k scores, which all count in full then."""

    tau: Float[Tensor, "B H R I"]
    is_whole: Bool[Tensor, "B H R I"]

    def soft(self, u: Tensor) -> Tensor:
        """Return min(u − τ, 1) of scores (B, H, R or 1, I or 1, M) that are above τ; 1 in rows that are whole."""
        return torch.where(self.is_whole[..., None], 1.0, (u - self.tau[..., None]).clamp(max=1.0))


def best(ranking: Ranking, members: Bool[Tensor, "B H R N"], k: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the k best members of each set, (B, H, R, k), and which of them there are."""
    num_positions = members.shape[-1]
    count = _in_order(members, ranking).cumsum(-1)
    rank_k = torch.arange(1, k + 1, device=members.device)
    place = torch.searchsorted(count, rank_k.expand(*count.shape[:-1], k).contiguous()).clamp(max=num_positions - 1)
    return _expanded(ranking.position, count).gather(-1, place), rank_k <= count[..., -1:]


def among_best(place: Int64[Tensor, "... 1 M"], members: Bool[Tensor, "... I M"], k: int) -> Bool[Tensor, "... I M"]:
    """Return which members of each set are its k best, by their places in the whole order."""
    order = place.argsort(-1)
    chosen = members.gather(-1, order.expand(members.shape)).cumsum(-1) <= k
    return chosen.gather(-1, order.argsort(-1).expand(members.shape)) & members


def thresholds(
    u_BHN: Float[Tensor, "B H N"],
    ranking: Ranking,
    members: Bool[Tensor, "B H R N"],
    own: Float[Tensor, "B H R C"],
    own_members: Bool[Tensor, "B H R I C"],
    k: int,
) -> Thresholds:
    """Return τ of the sets that consist of ``members`` (the R sets that rows share) and of those ``own_members`` of R
    other scores ``own`` that each of the I rows adds: Σ clamp(u − τ, 0, 1) = k over them.

    The sum falls with τ and is linear between two neighbours of all u and u − 1; bisection finds between which it is k,
    by comparisons, which have no derivative. There the scores are zero, full or free, and τ = (Σ_free u − (k −
    #full)) / #free, by whose derivative those of the projection are exact wherever the three sets do not change. Time:
    O(R·N) for sums that all rows of a set share, O(log N) times the C own scores a row.
    """
    z = u_BHN.gather(-1, ranking.position)
    edges = torch.cat([z, z - 1], -1).sort(-1).values
    is_member = _in_order(members, ranking).to(z.dtype)
    counts = F.pad(is_member.cumsum(-1), (1, 0))
    sums = F.pad((is_member * z[:, :, None]).cumsum(-1), (1, 0))
    # How many of all are above each edge, and how many by 1 or more: the same rounded u − 1 as among the edges.
    above = _expanded(torch.searchsorted(-z, -edges), counts)
    full = _expanded(torch.searchsorted(-(z - 1), -edges), counts)
    num_full = counts.gather(-1, full)
    num_free = counts.gather(-1, above) - num_full
    sum_free = sums.gather(-1, above) - sums.gather(-1, full)
    edges = _expanded(edges, counts)
    totals = num_full + sum_free - num_free * edges

    shape = own_members.shape[:-1]
    low = torch.zeros(shape, dtype=torch.int64, device=z.device)
    high = torch.full_like(low, edges.shape[-1])
    for _ in range(edges.shape[-1].bit_length()):
        middle = (low + high) // 2
        excess = (own[..., None, :] - edges.gather(-1, middle)[..., None]).clamp(0.0, 1.0)
        is_below = totals.gather(-1, middle) + (own_members * excess).sum(-1) >= k
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)

    edge = edges.gather(-1, low)[..., None]
    own_full = own_members & (own[..., None, :] - 1 > edge)
    own_free = own_members & (own[..., None, :] > edge) & ~own_full
    free = num_free.gather(-1, low) + own_free.sum(-1)
    to_share = k - num_full.gather(-1, low) - own_full.sum(-1)
    sum_of_free = sum_free.gather(-1, low) + (own_free * own[..., None, :]).sum(-1)
    # Where none is free the k best count in full, by any threshold that leaves the next one out: the edge's own.
    tau = torch.where(free > 0, (sum_of_free - to_share) / free.clamp(min=1), edge[..., 0])
    return Thresholds(tau, counts[..., -1:] + own_members.sum(-1) <= k)


def _expanded(of_all: Tensor, like: Tensor) -> Tensor:
    """Return what all R sets share, (B, H, M), once for each of them."""
    return of_all[:, :, None].expand(*like.shape[:-1], of_all.shape[-1])


def _in_order(members: Tensor, ranking: Ranking) -> Tensor:
    batch, heads, _ = ranking.position.shape
    members = members.expand(batch, heads, *members.shape[2:])
    return members.gather(-1, _expanded(ranking.position, members))
