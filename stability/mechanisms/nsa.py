"""`nsa`: native sparse attention (Yuan et al. 2025), the gated sum of attention to compressed blocks, to selected
blocks and to a sliding window."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._attention import require_groups
from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._compression import (
    LearnedCompression,
    MeanOfBlocks,
    blocks_of,
    complete_blocks,
    last_positions,
)
from stability.mechanisms._grouped import over_blocks, over_window, softmax_over, window_block
from stability.mechanisms._observed import AbstractAttention
from stability.models.precision import at_least_float32

BRANCHES = 3  # compression, selection, window, in this order wherever they stand side by side
FIXED = 3  # blocks that are always selected: the first, the own one, the one before it


class NativeSparseAttention(AbstractAttention):
    """Causal attention of three branches, y_i = W_o Σ_c g_i^c o_i^c + b_o per head, with gates g = σ(W_g x + b_g) of
    each head and branch (Yuan et al. 2025, arXiv:2502.11089, Eq. 5) and keys and values of its own for each branch.

    - compression (Eqs. 7, 8): softmax attention to φ(k), φ(v) of the blocks of l positions that start at every d-th
      one. A block is seen from its last position on; one that holds padding, never. Where none is seen, o = 0.
    - selection (Eqs. 9–12): softmax attention to the positions up to i of n blocks of l′ positions: the first, the own
      one, the one before it, and those n − 3 others that have the largest scores. A block's score is what the
      compression's softmax gives to the blocks that overlap it, times the number of strides that they share (Eq. 9),
      summed over the query heads of a group (Eq. 10), which therefore select the same. A score of 0 selects nothing.
    - window: softmax attention to i − w ≤ j ≤ i.

    RoPE turns the queries and keys of selection and window. Those of the compression stay as they are: of positions it
    has the embedding within a block, as in the public implementations; the paper says nothing of it.

    The compression is N × N/d numbers a head, quadratic in N; the other two are linear in N, on gathered blocks and on
    the band. The selection has no gradient: the output is smooth between two changes of it (`margin`).
    A difference of two losses that a change lies between does not show the second derivative of the piece.
    """

    class Config(Settings):
        """Sizes of blocks and window; the paper's, for 65,536 positions: 32, 16, 64, 16, 512, and a kv_heads of 4."""

        block: int = Field(default=8, ge=1, description="positions of a compressed block, l")
        stride: int = Field(
            default=4, ge=1, description="positions from one compressed block to the next, d; divides l"
        )
        selected_block: int = Field(
            default=16, ge=1, description="positions of a block that can be selected, l′: a multiple of d, l or more"
        )
        selected: int = Field(
            default=4, ge=FIXED, description="blocks that are selected, n, with the first, the own and the one before"
        )
        window: int = Field(default=16, ge=1, description="positions seen before in the window, besides oneself, w")
        compression: Literal["mlp", "mean"] = Field(
            default="mlp", description="what makes one key or value of a block: mlp, learned | mean of its positions"
        )
        kv_heads: int | None = Field(
            default=None,
            ge=1,
            description="heads of keys and values, each read by a group of query heads; divides the heads; null: all",
        )

        @model_validator(mode="after")
        def _blocks_fit_each_other(self) -> NativeSparseAttention.Config:
            """Refuse lengths of blocks of which Eq. 9 could not share out the scores."""
            for name in ("block", "selected_block"):
                if getattr(self, name) % self.stride:
                    raise ValueError(
                        f"mechanism.nsa.{name}={getattr(self, name)} must be a multiple of "
                        f"mechanism.nsa.stride={self.stride}"
                    )
            if self.selected_block < self.block:
                raise ValueError(
                    f"mechanism.nsa.selected_block={self.selected_block} must be mechanism.nsa.block={self.block} or "
                    "more"
                )
            return self

    directions = frozenset({CAUSAL})
    piecewise_smooth = True
    rows_sum_to_one = True
    maps_per_head = BRANCHES

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        if shape.rope is not None:
            shape.require_pairs()
        self.config, self.rope, self.heads, self.dropout = config, shape.rope, shape.heads, shape.dropout
        self.kv_heads = config.kv_heads or shape.heads
        self.group = self.heads // self.kv_heads
        self.qkv = nn.Linear(shape.width, shape.width + 2 * BRANCHES * self.kv_heads * shape.head_width)
        self.gate = nn.Linear(shape.width, BRANCHES * shape.heads)
        self.compress_key, self.compress_value = (
            LearnedCompression(self.kv_heads, config.block, shape.head_width)
            if config.compression == "mlp"
            else MeanOfBlocks()
            for _ in range(2)
        )
        self.out = nn.Linear(shape.width, shape.width)

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` holds the queries' matrix, and one of keys and one of values for each branch."""
        of_queries = self.qkv.in_features
        of_keys = (self.qkv.out_features - of_queries) // (2 * BRANCHES)
        return {"qkv": (of_queries, *(of_keys,) * (2 * BRANCHES)), "gate": (self.gate.out_features,)}

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        require_groups("nsa", config.kv_heads, heads)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, φ of each block, all pairs of a position and a compressed block, and for each position
        n·l′ keys of the selection and the band's blocks of the window."""
        width, head_width = shape.width, shape.head_width
        kv_heads = config.kv_heads or shape.heads
        of_maps = width + 2 * BRANCHES * kv_heads * head_width + BRANCHES * shape.heads + width
        num_blocks = max(0, num_positions - config.block) // config.stride + 1
        of_block = (config.block + 1) * head_width**2 if config.compression == "mlp" else 0
        length = min(config.selected_block, num_positions)
        in_blocks = -(-num_positions // length) * length
        selected = max(FIXED, min(config.selected, in_blocks // length)) * length
        block = window_block(config.window, num_positions)
        band = -(-num_positions // block) * block * (block + min(config.window, num_positions))
        pairs = num_positions * num_blocks + in_blocks * selected + band
        return float(num_positions * width * of_maps + 2 * kv_heads * num_blocks * of_block + 2 * pairs * width)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count the compressed blocks that are complete and the compression's own keys and values from the first block
        on that is not; every position for the selection, which may choose any block; the window's last w."""
        complete = max(0, (num_positions - config.block) // config.stride + 1)
        begun = num_positions - complete * config.stride
        kept = complete + begun + num_positions + min(num_positions, config.window)
        return (config.kv_heads or shape.heads) * kept

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend in the three branches and gate them: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BGRNK, turned_BGRNK, keys, values = self._projected(x_BND)
        p_BGRNC = self._compressed_weights(q_BGRNK, keys[0], mask_BN)
        chosen_BGNS, is_chosen_BGNS = self._selection(p_BGRNC)
        dropped, length = self.dropout if self.training else 0.0, self.config.selected_block
        parts = (
            F.dropout(p_BGRNC, dropped) @ self._compressed_values(values[0])[:, :, None],
            over_blocks(turned_BGRNK, keys[1], values[1], chosen_BGNS, is_chosen_BGNS, length, mask_BN, dropped),
            over_window(turned_BGRNK, keys[2], values[2], self.config.window, mask_BN, dropped),
        )
        return self.joined(torch.cat([part.flatten(1, 2) for part in parts], 1), x_BND)

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the layer's output from what its maps made, (B, 3H, N, K): the heads' gated sums over the branches,
        side by side, through W_o."""
        gate_BNCH = at_least_float32(self.gate(x_BND)).sigmoid().unflatten(-1, (BRANCHES, self.heads))
        gated_BHNK = (gate_BNCH.permute(0, 2, 3, 1)[..., None] * y_BHNK.unflatten(1, (BRANCHES, self.heads))).sum(1)
        return self.out(gated_BHNK.transpose(1, 2).flatten(2))

    def _projected(self, x_BND: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return queries as they are and turned, (B, G, R, N, K) with R heads in a group, and the keys and values of
        the branches, (B, G, N, K) each; keys of selection and window turned."""
        heads = (self.heads, *(self.kv_heads,) * (2 * BRANCHES))
        q_BHNK, *kv = (part.transpose(1, 2) for part in self.qkv(x_BND).unflatten(-1, (sum(heads), -1)).split(heads, 2))
        k_c, k_s, k_w, *values = kv
        turn = (lambda u: u) if self.rope is None else self.rope
        grouped = (self.kv_heads, self.group)
        return q_BHNK.unflatten(1, grouped), turn(q_BHNK).unflatten(1, grouped), (k_c, turn(k_s), turn(k_w)), (*values,)

    def _compressed_weights(self, q_BGRNK: Tensor, k_BGNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the softmax over the complete blocks (B, G, R, N, C), Eq. 8; zero in rows that see none."""
        k_BGCK = self.compress_key(blocks_of(k_BGNK, self.config.block, self.config.stride))
        block, stride = self.config.block, self.config.stride
        visible = complete_blocks(k_BGNK.shape[2], block, stride, mask_BN, k_BGNK.device)[:, None]
        return softmax_over(q_BGRNK @ k_BGCK[:, :, None].mT / math.sqrt(k_BGNK.shape[-1]), visible)

    def _compressed_values(self, v_BGNK: Tensor) -> Float[Tensor, "B G C K"]:
        return self.compress_value(blocks_of(v_BGNK, self.config.block, self.config.stride))

    def _scores(self, p_BGRNC: Tensor) -> Float[Tensor, "B G N S"]:
        """Return the score of each block (Eqs. 9, 10), 0 for those that are always selected."""
        num_positions, num_compressed = p_BGRNC.shape[-2:]
        strides, span = self.config.selected_block // self.config.stride, self.config.block // self.config.stride
        num_blocks = -(-num_positions // self.config.selected_block)
        strides = min(strides, num_compressed) if num_blocks == 1 else strides  # of one block, always selected
        # what falls to each stride: the sum of the compressed blocks that hold it
        padded = F.pad(p_BGRNC.sum(2), (span - 1, num_blocks * strides - num_compressed))
        score_BGNS = padded.unfold(-1, span, 1).sum(-1).unflatten(-1, (num_blocks, strides)).sum(-1)
        return score_BGNS.masked_fill(self._always(num_positions, p_BGRNC.device), 0.0)

    def _always(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N S"]:
        """Return True for the blocks that a position always selects: the first, its own and the one before it."""
        block_S = torch.arange(-(-num_positions // self.config.selected_block), device=device)
        own_N1 = torch.arange(num_positions, device=device)[:, None] // self.config.selected_block
        return (block_S == own_N1) | (block_S == own_N1 - 1) | (block_S == 0)

    def _selection(self, p_BGRNC: Tensor) -> tuple[Int64[Tensor, "B G N S"], Bool[Tensor, "B G N S"]]:
        """Return the blocks that are selected by their scores (Eq. 11), at most n − 3, of equal scores the earlier
        ones, and which of these entries are there."""
        score_BGNS = self._scores(p_BGRNC)
        num_free = min(self.config.selected, max(score_BGNS.shape[-1], FIXED)) - FIXED
        # topk takes any of equal scores, others as the sequence grows: text that recurs would be read by its length
        best = score_BGNS.sort(dim=-1, descending=True, stable=True)
        return best.indices[..., :num_free], best.values[..., :num_free] > 0

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the least difference between the lowest score that is selected and the highest that is not, of valid
        positions; inf where all blocks that have a score are selected."""
        q_BGRNK, _, keys, _ = self._projected(without_padding(x_BND, mask_BN))
        score_BGNS = self._scores(self._compressed_weights(q_BGRNK, keys[0], mask_BN))
        if not FIXED < self.config.selected < score_BGNS.shape[-1]:
            return score_BGNS.new_tensor(math.inf)
        best_BGNS = score_BGNS.topk(self.config.selected - FIXED + 1, -1).values
        gap_BGN = (best_BGNS[..., -2] - best_BGNS[..., -1]).where(best_BGNS[..., -1] > 0, math.inf)
        return gap_BGN.amin() if mask_BN is None else gap_BGN.where(mask_BN[:, None], math.inf).amin()

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B M N N"]:
        """Return the weights of the compression's maps, then the selection's, then the window's, H each.

        A compressed value stands at its block's last position, from which on it is seen: there the compression has its
        weights, and nowhere else.
        """
        q_BGRNK, turned_BGRNK, keys, _ = self._projected(without_padding(x_BND, mask_BN))
        num_positions = x_BND.shape[1]
        p_BGRNC = self._compressed_weights(q_BGRNK, keys[0], mask_BN)
        chosen_BGNS, is_chosen_BGNS = self._selection(p_BGRNC)
        position_N = torch.arange(num_positions, device=x_BND.device)
        ahead_NN = position_N - position_N[:, None]
        num_blocks = -(-num_positions // self.config.selected_block)
        none_BGNS = torch.zeros(*chosen_BGNS.shape[:3], num_blocks, dtype=torch.bool, device=x_BND.device)
        is_block_BGNS = none_BGNS.scatter(-1, chosen_BGNS, is_chosen_BGNS) | self._always(num_positions, x_BND.device)
        of_blocks = is_block_BGNS[..., position_N // self.config.selected_block] & (ahead_NN <= 0)
        of_window = ((ahead_NN <= 0) & (ahead_NN >= -self.config.window)).expand_as(of_blocks)
        maps = [p_BGRNC @ self._ends(num_positions, x_BND).to(p_BGRNC.dtype)]
        for k_BGNK, visible in ((keys[1], of_blocks), (keys[2], of_window)):
            seen = visible[:, :, None] if mask_BN is None else visible[:, :, None] & mask_BN[:, None, None, None]
            logits = turned_BGRNK @ k_BGNK[:, :, None].mT / math.sqrt(k_BGNK.shape[-1])
            maps.append(logits.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0))
        return torch.cat([part.flatten(1, 2) for part in maps], 1)

    def values(self, x_BND: Tensor) -> Float[Tensor, "B M N K"]:
        """Return the values that `weights` weighs; the compression's are φ of a block at its last position, 0
        elsewhere."""
        values = self._projected(x_BND)[3]
        ends_CN = self._ends(x_BND.shape[1], x_BND)
        of_blocks = ends_CN.mT.to(values[0].dtype) @ self._compressed_values(values[0])
        return torch.cat([part.repeat_interleave(self.group, 1) for part in (of_blocks, *values[1:])], 1)

    def _ends(self, num_positions: int, like: Tensor) -> Bool[Tensor, "C N"]:
        """Return True where a position is the last of a compressed block."""
        last_C = last_positions(num_positions, self.config.block, self.config.stride, like.device)
        return last_C[:, None] == torch.arange(num_positions, device=like.device)


EXPORT = NativeSparseAttention
