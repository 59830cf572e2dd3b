"""`sparsek`: softmax attention to the k keys with the best scores, weighted by a differentiable top-k.

From Lou et al. 2024.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._attention import QKNormSettings
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding
from stability.mechanisms._observed import AbstractAttention
from stability.mechanisms._sparse_top_k import Ranking, Thresholds, best, mark_best, thresholds
from stability.models.passes import at_least_float32, in_float32

MIN_BLOCK = 32  # smallest block of queries


class SparseKAttention(AbstractAttention):
    """Attention to keys selected by a scorer, independently of the query.

    u = W_s x, one score per head; m = SparseK(u, k) = clamp(u − τ, 0, 1) with Σ m = k over the positions visible to i.
    Of these the k best, S_i, are kept, and y_i = W_o Σ_{j ∈ S_i} softmax_j(q̃_i·(m_ij k̃_j) / √K) m_ij v_j + b_o per
    head. RoPE on q and k. In the paper (arXiv:2406.16747) this is K̂ = ΔK and V̂ = ΔV, with Δ the rows of diag(m) kept
    by top-k. The scorer learns through m.

    Bidirectional: one m for the whole sequence. Causal: m_i is the projection over the prefix j ≤ i. With at most k
    visible positions all m are 1, as in `sa`. Positions within ``window`` of i are always visible, with m_ij = 1, in
    addition to those in S_i farther away. The paper's slope of u over positions is omitted; among equal scores the
    later position is kept.

    Queries are processed in blocks of c = max(32, √N). A causal block reads the k best positions before it and its own
    positions. Attention takes O(N·(k + c + 2w)) products, the causal thresholds O(N·c·log N + N²/c) additions: N^1.5
    log N for long sequences, never (N, N). The output jumps if a key enters or leaves S_i; otherwise it is smooth.
    """

    class Config(QKNormSettings):
        """Settings for the number of kept keys."""

        k: int = Field(default=32, ge=1, description="keys that are kept of all that a position may see")
        window: int | None = Field(
            default=8,
            ge=0,
            description="positions on each side (causal: before), and oneself, that are seen besides; null: none",
        )

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    piecewise_smooth = True
    rows_sum_to_one = False

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        if shape.rope is not None:
            shape.require_pairs()
        self.rope, self.heads, self.causal = shape.rope, shape.heads, shape.direction == CAUSAL
        self.k, self.window, self.dropout = config.k, config.window, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.q_norm, self.k_norm = config.make_norms(shape.head_width)
        self.scorer = nn.Linear(shape.width, shape.heads, bias=False)  # a constant added to all scores has no effect
        self.out = nn.Linear(shape.width, shape.width)

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` is three matrices: queries, keys and values."""
        return {"qkv": (self.qkv.in_features,) * 3}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k: under RoPE scores fall with distance, as in `sa`."""
        self.qkv.bias[: 2 * self.qkv.in_features] = bias

    @classmethod
    def cost(cls, config: Config, shape: MixerShape, num_positions: int) -> float:
        """Count four D² projections, the scores, and two products with D per computed pair.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        block, num_blocks = _blocks(num_positions)
        is_causal = shape.direction == CAUSAL
        selected = _num_before(config.k, block, num_blocks) + block if is_causal else min(config.k, num_blocks * block)
        reach = min(config.window or 0, num_blocks * block)
        band = 0 if config.window is None else block + reach * (1 if is_causal else 2)
        pairs = num_blocks * block * (selected + band)
        return float(num_positions * shape.width * (4 * shape.width + shape.heads) + 2 * pairs * shape.width)

    @classmethod
    def num_kept(cls, config: Config, shape: MixerShape, num_positions: int) -> int:
        """Count the k best so far and the window.

        A position that has left the best never returns, since scores do not change. The window may contain none of the
        best.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        return shape.heads * min(num_positions, config.k + (config.window or 0))

    @classmethod
    def state_size(cls, config: Config, shape: MixerShape, num_positions: int) -> int | None:
        """Count every score, in addition to keys and values.

        Any number of close scores enters the threshold τ, even outside the best.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        of_keys = super().state_size(config, shape, num_positions)
        return None if of_keys is None else of_keys + shape.heads * num_positions

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend in query blocks to selected positions and the band: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        num_positions = x_BND.shape[1]
        block, num_blocks = _blocks(num_positions)
        fill = block * num_blocks - num_positions
        q, k, v = (F.pad(part, (0, 0, 0, fill)) for part in self.split(x_BND))
        u_BHN = F.pad(self.scores(x_BND), (0, fill))
        valid_BN = torch.ones(x_BND.shape[:2], dtype=torch.bool, device=x_BND.device) if mask_BN is None else mask_BN
        valid_BN = F.pad(valid_BN, (0, fill))
        position, soft, seen = (self._select_keys if self.causal else self._global)(u_BHN, valid_BN, block)
        keys, values = (_gather_at(part, position) for part in (k, v))
        if self.window is not None:
            in_band = self._mark_band(valid_BN, block)
            keys, values = (torch.cat([ours, self._band(of, block)], -2) for ours, of in ((keys, k), (values, v)))
            in_band = in_band.expand(*seen.shape[:-1], -1)
            soft = torch.cat([soft.expand(seen.shape), torch.ones_like(in_band, dtype=soft.dtype)], -1)
            seen = torch.cat([seen, in_band], -1)
        y = self._attend(q.unflatten(2, (num_blocks, block)), keys, values, soft, seen)
        return self.joined(y.flatten(2, 3)[:, :, :num_positions], x_BND)

    def split(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and values, (B, H, N, K) each."""
        qkv_BNTHK = self.qkv(x_BND).unflatten(-1, (3, self.heads, -1))
        qk_BNTHK, v_BNHK = qkv_BNTHK[:, :, :2], qkv_BNTHK[:, :, 2]
        if self.q_norm is not None and self.k_norm is not None:
            qk_BNTHK = torch.stack([self.q_norm(qk_BNTHK[:, :, 0]), self.k_norm(qk_BNTHK[:, :, 1])], 2)
        turned = qk_BNTHK if self.rope is None else self.rope(qk_BNTHK, position_dim=1)
        q_BHNK, k_BHNK = (part.transpose(1, 2) for part in turned.to(v_BNHK.dtype).unbind(2))
        return q_BHNK, k_BHNK, v_BNHK.transpose(1, 2)

    def scores(self, x_BND: Tensor) -> Float[Tensor, "B H N"]:
        """Return u, in float32 or wider: fewer bits would create ties."""
        with in_float32(x_BND.device):
            return self.scorer(at_least_float32(x_BND)).transpose(1, 2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, soft: Tensor, seen: Tensor) -> Tensor:
        """Return Σ softmax(q·(m k) / √K) m v for each block's queries, zero in empty rows."""
        a = self._average(q @ keys.mT, soft * seen, seen)
        return F.dropout(a, self.dropout, self.training) @ values

    def _average(self, products: Tensor, soft: Tensor, seen: Tensor) -> Tensor:
        """Return softmax(m q·k / √K) m over visible keys, from products q·k."""
        head_width = self.out.in_features // self.heads
        hidden = ~seen & seen.any(-1, keepdim=True)  # the softmax of a fully hidden row would be NaN
        return (products * soft / math.sqrt(head_width)).masked_fill(hidden, -math.inf).softmax(-1) * soft

    def _global(self, u_BHN: Tensor, valid_BN: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k best positions per sequence (B, H, 1, k), their m, and their visible pairs."""
        ranking, num_blocks = Ranking.of(u_BHN), u_BHN.shape[-1] // block
        members = valid_BN[:, None, None].expand(-1, self.heads, -1, -1)
        position, exists = best(ranking, members, min(self.k, u_BHN.shape[-1]))
        nothing = members.new_zeros(*members.shape[:-1], 1, 0)
        level = thresholds(u_BHN, ranking, members, nothing[..., 0, :].to(u_BHN.dtype), nothing, self.k)
        soft = level.soft(_gather_at(u_BHN, position)[..., None, :])
        queries = torch.arange(u_BHN.shape[-1], device=u_BHN.device).view(num_blocks, block, 1)
        seen = exists[..., None, :] & ~self._is_near(queries, position[..., None, :])
        return position.expand(-1, -1, num_blocks, -1), soft, seen

    def _select_keys(self, u_BHN: Tensor, valid_BN: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return each block's k best positions before it and its own positions.

        They are (B, H, blocks, k + c), with m per query of the block, and visibility per query.
        """
        ranking, num_blocks = Ranking.of(u_BHN), u_BHN.shape[-1] // block
        positions = torch.arange(u_BHN.shape[-1], device=u_BHN.device)
        own = positions.view(num_blocks, block)
        members = (positions < own[:, :1]) & valid_BN[:, None, None].expand(-1, self.heads, -1, -1)
        before, exists = best(ranking, members, _num_before(self.k, block, num_blocks))
        own_members = (own[:, None] <= own[..., None]) & valid_BN.view(-1, 1, num_blocks, 1, block)
        own_members = own_members.expand(-1, self.heads, -1, -1, -1)
        tau = thresholds(u_BHN, ranking, members, u_BHN.unflatten(-1, (num_blocks, block)), own_members, self.k)

        position = torch.cat([before, own.expand(*before.shape[:-1], -1)], -1)
        visible = torch.cat([exists[..., None, :].expand(*own_members.shape[:-1], -1), own_members], -1)
        kept = mark_best(_gather_at(ranking.place, position)[..., None, :], visible, self.k)
        seen = kept & ~self._is_near(own[..., None], position[..., None, :])
        return position, tau.soft(_gather_at(u_BHN, position)[..., None, :]), seen

    def _is_near(self, query: Tensor, key: Tensor) -> Bool[Tensor, "*rows M"]:
        """Return whether key positions are within the window of query positions."""
        if self.window is None:
            return torch.zeros(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=query.device)
        after = 0 if self.causal else self.window
        return (key >= query - self.window) & (key <= query + after)

    def _reach(self, num_positions: int) -> tuple[int, int]:
        """Return the window's reach before and after a query, at most the sequence length."""
        reach = min(self.window or 0, num_positions)
        return reach, 0 if self.causal else reach

    def _band(self, k_BHNK: Tensor, block: int) -> Tensor:
        """Return the keys within the window of any query in a block, (B, H, blocks, w + c + w, K)."""
        before, after = self._reach(k_BHNK.shape[2])
        return F.pad(k_BHNK, (0, 0, before, after)).unfold(2, before + block + after, block).transpose(-1, -2)

    def _mark_band(self, valid_BN: Tensor, block: int) -> Bool[Tensor, "B 1 blocks c W"]:
        """Return True at the keys in `_band` visible to each query."""
        before, after = self._reach(valid_BN.shape[1])
        exists = F.pad(valid_BN, (before, after)).unfold(1, before + block + after, block)
        query = torch.arange(block, device=valid_BN.device)[:, None]
        key = torch.arange(-before, block + after, device=valid_BN.device)
        return self._is_near(query, key) & exists[:, None, :, None]

    def _dense(self, x_BND: Tensor, mask_BN: Tensor | None) -> tuple[Tensor, Thresholds, Tensor]:
        """Return scores u (B, H, N), thresholds per row (B, H, 1, N), and visible pairs (B, H, N, N)."""
        u_BHN, num_positions = self.scores(x_BND), x_BND.shape[1]
        visible = torch.ones(*u_BHN.shape, num_positions, dtype=torch.bool, device=x_BND.device)
        visible = visible.tril() if self.causal else visible
        visible = visible if mask_BN is None else visible & mask_BN[:, None, None]
        none = torch.zeros_like(u_BHN, dtype=torch.bool)[:, :, None]
        return (
            u_BHN,
            thresholds(u_BHN, Ranking.of(u_BHN), none, u_BHN[:, :, None], visible[:, :, None], self.k),
            visible,
        )

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        x_BND = without_padding(x_BND, mask_BN)
        u_BHN, tau, visible = self._dense(x_BND, mask_BN)
        position = torch.arange(x_BND.shape[1], device=x_BND.device)
        is_near = self._is_near(position[:, None], position)
        soft = torch.where(is_near, 1.0, tau.soft(u_BHN[:, :, None, None])[:, :, 0])
        seen = visible & (is_near | mark_best(Ranking.of(u_BHN).place[:, :, None], visible, self.k))
        q_BHNK, k_BHNK, _ = self.split(x_BND)
        return self._average(q_BHNK @ k_BHNK.mT, soft * seen, seen)

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        return self.split(x_BND)[2]

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the distance to the next change in the k best or kink in m."""
        x_BND = without_padding(x_BND, mask_BN)
        u_BHN, tau, visible = self._dense(x_BND, mask_BN)
        visible = visible & (torch.ones_like(visible) if mask_BN is None else mask_BN[:, None, :, None])
        u_BHNN = u_BHN[:, :, None].masked_fill(~visible, -math.inf)
        ordered = F.pad(u_BHNN, (0, self.k + 1), value=-math.inf).topk(self.k + 1).values
        gap_BHN = torch.where(visible.sum(-1) > self.k, ordered[..., -2] - ordered[..., -1], math.inf)
        above_BHNN = u_BHNN - tau.tau[:, :, 0, :, None]
        kink_BHN = torch.minimum(above_BHNN.abs(), (above_BHNN - 1).abs()).amin(-1)
        # With a gap of 1 the k best have weight 1, and any threshold in between is valid.
        return torch.where(gap_BHN < 1, torch.minimum(gap_BHN, kink_BHN), gap_BHN - 1).min()


def _blocks(num_positions: int) -> tuple[int, int]:
    """Return the number of queries per block, and the number of blocks."""
    block = min(max(MIN_BLOCK, math.isqrt(num_positions)), num_positions)
    return block, -(-num_positions // block)


def _num_before(k: int, block: int, num_blocks: int) -> int:
    """Return the maximum number of positions before a block in its selection."""
    return min(k, (num_blocks - 1) * block)


def _gather_at(of_all: Tensor, position: Tensor) -> Tensor:
    """Gather (B, H, N) or (B, H, N, K) at positions (B, H, blocks, M)."""
    flat = position.flatten(2)
    if of_all.ndim == 4:
        flat = flat[..., None].expand(*flat.shape, of_all.shape[-1])
    return of_all.gather(2, flat).unflatten(2, position.shape[2:])


EXPORT = SparseKAttention
