"""Project scores on soft k-hot vectors, for many prefixes of a sequence at once.

SparseK(u, k) = argmin ‖p − u‖² over 0 ≤ p ≤ 1, Σ p = k (Lou et al. 2024, arXiv:2406.16747, Algorithm 1: p = clamp(u −
τ, 0, 1)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """Order of a sequence's scores: best first, later first among equal scores.

    The order of two positions does not depend on the positions between them. So a position that has left the best k of
    a prefix is in no longer prefix's best k.

    Attributes:
        position: position at each rank, (B, H, N).
        place: rank of each position, (B, H, N).
    """

    position: Int64[Tensor, "B H N"]
    place: Int64[Tensor, "B H N"]

    @classmethod
    def of(cls, u_BHN: Tensor) -> Ranking:
        position = u_BHN.shape[-1] - 1 - u_BHN.flip(-1).argsort(dim=-1, descending=True, stable=True)
        return cls(position, position.argsort(-1))


@dataclass(frozen=True)
class Thresholds:
    """Thresholds per row, and a flag for rows with at most k scores.

    Attributes:
        tau: τ.
        is_whole: True for rows with at most k scores; all these have weight 1.
    """

    tau: Float[Tensor, "B H R I"]
    is_whole: Bool[Tensor, "B H R I"]

    def soft(self, u: Tensor) -> Tensor:
        """Return min(u − τ, 1) for scores above τ, and 1 in whole rows.

        u is (B, H, R or 1, I or 1, M).
        """
        return torch.where(self.is_whole[..., None], 1.0, (u - self.tau[..., None]).clamp(max=1.0))


def best(ranking: Ranking, members: Bool[Tensor, "B H R N"], k: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the k best members per set, (B, H, R, k), and their existence.

    Args:
        ranking: order of all scores.
        members: (B, H, R, N), True at members.
        k: positions per set.
    """
    num_positions = members.shape[-1]
    count = _reorder(members, ranking).cumsum(-1)
    rank_k = torch.arange(1, k + 1, device=members.device)
    place = torch.searchsorted(count, rank_k.expand(*count.shape[:-1], k).contiguous()).clamp(max=num_positions - 1)
    return _expand(ranking.position, count).gather(-1, place), rank_k <= count[..., -1:]


def mark_best(place: Int64[Tensor, "... 1 M"], members: Bool[Tensor, "... I M"], k: int) -> Bool[Tensor, "... I M"]:
    """Return True at the k best members of each set.

    Args:
        place: rank of each position in the whole order.
        members: True at members.
        k: members to choose.
    """
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
    """Return τ with Σ clamp(u − τ, 0, 1) = k over each row's set.

    A row's set is its shared ``members`` plus its ``own_members``. Time is O(R·N) for sums shared by all rows of a set,
    and O(log N) times the C own scores per row.

    Args:
        u_BHN: scores.
        ranking: order of the scores.
        members: R sets shared by rows.
        own: C other scores per set.
        own_members: entries of ``own`` in each of the I rows.
        k: target sum.
    """
    # The sum falls with τ and is linear between neighbours among all u and u − 1. Bisection finds the interval that
    # contains k, by comparisons, without derivative. There scores are zero, full or free, and
    # τ = (Σ_free u − (k − #full)) / #free: its derivative gives the projection's exactly, unless the three sets change.
    z = u_BHN.gather(-1, ranking.position)
    edges = torch.cat([z, z - 1], -1).sort(-1).values
    is_member = _reorder(members, ranking).to(z.dtype)
    counts = F.pad(is_member.cumsum(-1), (1, 0))
    sums = F.pad((is_member * z[:, :, None]).cumsum(-1), (1, 0))
    # Number of scores above each edge, and by 1 or more: the same rounded u − 1 as among the edges.
    above = _expand(torch.searchsorted(-z, -edges), counts)
    full = _expand(torch.searchsorted(-(z - 1), -edges), counts)
    num_full = counts.gather(-1, full)
    num_free = counts.gather(-1, above) - num_full
    sum_free = sums.gather(-1, above) - sums.gather(-1, full)
    edges = _expand(edges, counts)
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
    # If no score is free the k best have weight 1, for any threshold that excludes the next one: use the edge.
    tau = torch.where(free > 0, (sum_of_free - to_share) / free.clamp(min=1), edge[..., 0])
    return Thresholds(tau, counts[..., -1:] + own_members.sum(-1) <= k)


def _expand(of_all: Tensor, like: Tensor) -> Tensor:
    """Repeat a (B, H, M) tensor shared by all R sets, once per set."""
    return of_all[:, :, None].expand(*like.shape[:-1], of_all.shape[-1])


def _reorder(members: Tensor, ranking: Ranking) -> Tensor:
    batch, heads, _ = ranking.position.shape
    members = members.expand(batch, heads, *members.shape[2:])
    return members.gather(-1, _expand(ranking.position, members))
