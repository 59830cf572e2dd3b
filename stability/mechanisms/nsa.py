"""`nsa`: native sparse attention, a gated sum of three attention branches.

The branches are compressed blocks, selected blocks and a sliding window (Yuan et al. 2025).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.mechanisms._attention import QKNormSettings, prepare, require_groups
from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._grouped import attend_blocks, attend_window, masked_softmax, window_block
from stability.mechanisms._observed import AbstractAttention
from stability.models.passes import at_least_float32

BRANCHES = 3  # compression, selection, window, in this order in every tensor
BLOCK = 8  # positions of a compressed block by default
FIXED = 3  # always selected blocks: first, own, previous


class NativeSparseAttention(AbstractAttention):
    """Causal attention with three gated branches, y_i = W_o Σ_c g_i^c o_i^c + b_o per head.

    Gates are g = σ(W_g x + b_g) per head and branch (Yuan et al. 2025, arXiv:2502.11089, Eq. 5). Each branch has its
    own keys and values.

    - compression (Eqs. 7, 8): softmax attention to φ(k), φ(v) for blocks with l positions, one start per d positions. A
      block is visible from its last position on; a block with padding, never. Without visible blocks o = 0.
    - selection (Eqs. 9–12): softmax attention to positions up to i in n blocks with l′ positions: the first, the own
      and the previous one, and the n − 3 others with the largest scores. A block's score sums the compression's softmax
      over overlapping blocks, times the number of shared strides (Eq. 9), over the query heads in a group (Eq. 10), so
      that a group selects the same blocks. A score of 0 selects nothing.
    - window: softmax attention to i − w ≤ j ≤ i.

    RoPE rotates queries and keys in selection and window, but not in compression. The compression's only position
    signal is the embedding within a block, as in public implementations; the paper does not specify this.

    The compression has N × N/d numbers per head, quadratic in N. The other two branches are linear in N, on gathered
    blocks and on the band. The selection has no gradient: the output is smooth between two changes in the selection
    (`margin`). If a change lies between two losses, their difference does not show the piece's second derivative.
    """

    class Config(QKNormSettings):
        """Block and window sizes; the paper's, for 65,536 positions: 32, 16, 64, 16, 512, and kv_heads 4."""

        block: int = Field(default=BLOCK, ge=1, description="positions of a compressed block, l")
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
        def _check_blocks(self) -> NativeSparseAttention.Config:
            """Refuse block lengths not supported by Eq. 9."""
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
        self.q_norm, self.k_norm = config.make_norms(shape.head_width)
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
        """``qkv`` is the queries' matrix, then one for keys and one for values per branch."""
        of_queries = self.qkv.in_features
        of_keys = (self.qkv.out_features - of_queries) // (2 * BRANCHES)
        return {"qkv": (of_queries, *(of_keys,) * (2 * BRANCHES)), "gate": (self.gate.out_features,)}

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        require_groups("nsa", config.kv_heads, heads)

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        # the learned compression's weights grow with a block that is never complete; shorter models have the default
        if config.block > max(num_positions, BLOCK):
            raise ValueError(f"mechanism.nsa.block={config.block} must fit in model.positions={num_positions}")

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, φ of each block, and the pairs in all three branches.

        Compression counts all pairs of position and compressed block, selection n·l′ keys per position, window the
        band's blocks.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
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
        """Count the keys and values stored by each branch.

        Compression stores complete blocks, and the keys and values from the first incomplete block on. Selection stores
        every position, since it may choose any block. The window stores the last w.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        complete = max(0, (num_positions - config.block) // config.stride + 1)
        begun = num_positions - complete * config.stride
        kept = complete + begun + num_positions + min(num_positions, config.window)
        return (config.kv_heads or shape.heads) * kept

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Compute the three branches and their gated sum: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BGRNK, turned_BGRNK, keys, values = self._project(x_BND)
        p_BGRNC = self._weigh_blocks(q_BGRNK, keys[0], mask_BN)
        chosen_BGNS, is_chosen_BGNS = self._selection(p_BGRNC)
        dropped, length = self.dropout if self.training else 0.0, self.config.selected_block
        parts = (
            F.dropout(p_BGRNC, dropped) @ self._compress_values(values[0])[:, :, None],
            attend_blocks(turned_BGRNK, keys[1], values[1], chosen_BGNS, is_chosen_BGNS, length, mask_BN, dropped),
            attend_window(turned_BGRNK, keys[2], values[2], self.config.window, mask_BN, dropped),
        )
        return self.joined(torch.cat([part.flatten(1, 2) for part in parts], 1), x_BND)

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the layer's output from the maps' outputs, (B, 3H, N, K).

        Each head sums its branches with gates; then heads are concatenated, through W_o.
        """
        gate_BNCH = at_least_float32(self.gate(x_BND)).sigmoid().unflatten(-1, (BRANCHES, self.heads))
        gated_BHNK = (gate_BNCH.permute(0, 2, 3, 1)[..., None] * y_BHNK.unflatten(1, (BRANCHES, self.heads))).sum(1)
        return self.out(gated_BHNK.transpose(1, 2).flatten(2))

    def _project(self, x_BND: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return queries, rotated queries, and the branches' keys and values.

        Queries are (B, G, R, N, K) with R heads per group, keys and values (B, G, N, K) each. Keys for selection and
        window are rotated. ``qk_norm`` norms the keys of all branches by the same gains.
        """
        heads = (self.heads, *(self.kv_heads,) * (2 * BRANCHES))
        q_BHNK, *kv = (part.transpose(1, 2) for part in self.qkv(x_BND).unflatten(-1, (sum(heads), -1)).split(heads, 2))
        k_c, k_s, k_w, *values = kv
        keys = prepare(k_c, self.k_norm, None), *(prepare(k, self.k_norm, self.rope) for k in (k_s, k_w))
        queries = (prepare(q_BHNK, self.q_norm, rope) for rope in (None, self.rope))
        q_BGRNK, turned_BGRNK = (q.unflatten(1, (self.kv_heads, self.group)) for q in queries)
        return q_BGRNK, turned_BGRNK, keys, (*values,)

    def _weigh_blocks(self, q_BGRNK: Tensor, k_BGNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the softmax over complete blocks (B, G, R, N, C), Eq. 8; zero in empty rows."""
        k_BGCK = self.compress_key(blocks_of(k_BGNK, self.config.block, self.config.stride))
        block, stride = self.config.block, self.config.stride
        visible = complete_blocks(k_BGNK.shape[2], block, stride, mask_BN, k_BGNK.device)[:, None]
        return masked_softmax(q_BGRNK @ k_BGCK[:, :, None].mT / math.sqrt(k_BGNK.shape[-1]), visible)

    def _compress_values(self, v_BGNK: Tensor) -> Float[Tensor, "B G C K"]:
        return self.compress_value(blocks_of(v_BGNK, self.config.block, self.config.stride))

    def _scores(self, p_BGRNC: Tensor) -> Float[Tensor, "B G N S"]:
        """Return each block's score (Eqs. 9, 10), 0 for always selected blocks."""
        num_positions, num_compressed = p_BGRNC.shape[-2:]
        strides, span = self.config.selected_block // self.config.stride, self.config.block // self.config.stride
        num_blocks = -(-num_positions // self.config.selected_block)
        strides = min(strides, num_compressed) if num_blocks == 1 else strides  # a single block is always selected
        # each stride gets the sum over the compressed blocks that contain it
        padded = F.pad(p_BGRNC.sum(2), (span - 1, num_blocks * strides - num_compressed))
        score_BGNS = padded.unfold(-1, span, 1).sum(-1).unflatten(-1, (num_blocks, strides)).sum(-1)
        return score_BGNS.masked_fill(self._always(num_positions, p_BGRNC.device), 0.0)

    def _always(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N S"]:
        """Return True for a position's always selected blocks: first, own, previous."""
        block_S = torch.arange(-(-num_positions // self.config.selected_block), device=device)
        own_N1 = torch.arange(num_positions, device=device)[:, None] // self.config.selected_block
        return (block_S == own_N1) | (block_S == own_N1 - 1) | (block_S == 0)

    def _selection(self, p_BGRNC: Tensor) -> tuple[Int64[Tensor, "B G N S"], Bool[Tensor, "B G N S"]]:
        """Return the blocks selected by score (Eq. 11), at most n − 3, and a flag per entry.

        The flag is False for a score of 0. Among equal scores earlier blocks come first.
        """
        score_BGNS = self._scores(p_BGRNC)
        num_free = min(self.config.selected, max(score_BGNS.shape[-1], FIXED)) - FIXED
        # topk breaks ties arbitrarily: for repeated text the choice would depend on the sequence length
        best = score_BGNS.sort(dim=-1, descending=True, stable=True)
        return best.indices[..., :num_free], best.values[..., :num_free] > 0

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the gap between the lowest selected and the highest unselected score.

        It is the minimum over valid positions; inf if all blocks with a score are selected.
        """
        q_BGRNK, _, keys, _ = self._project(without_padding(x_BND, mask_BN))
        score_BGNS = self._scores(self._weigh_blocks(q_BGRNK, keys[0], mask_BN))
        if not FIXED < self.config.selected < score_BGNS.shape[-1]:
            return score_BGNS.new_tensor(math.inf)
        best_BGNS = score_BGNS.topk(self.config.selected - FIXED + 1, -1).values
        gap_BGN = (best_BGNS[..., -2] - best_BGNS[..., -1]).where(best_BGNS[..., -1] > 0, math.inf)
        return gap_BGN.amin() if mask_BN is None else gap_BGN.where(mask_BN[:, None], math.inf).amin()

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B M N N"]:
        """Return the weights of compression, then selection, then window, H maps each.

        A compressed value is placed at its block's last position, the first that sees it. So compression weights are
        nonzero only there.
        """
        q_BGRNK, turned_BGRNK, keys, _ = self._project(without_padding(x_BND, mask_BN))
        num_positions = x_BND.shape[1]
        p_BGRNC = self._weigh_blocks(q_BGRNK, keys[0], mask_BN)
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
        """Return the values for `weights`.

        The compression's are φ of a block at its last position, 0 elsewhere.
        """
        values = self._project(x_BND)[3]
        ends_CN = self._ends(x_BND.shape[1], x_BND)
        of_blocks = ends_CN.mT.to(values[0].dtype) @ self._compress_values(values[0])
        return torch.cat([part.repeat_interleave(self.group, 1) for part in (of_blocks, *values[1:])], 1)

    def _ends(self, num_positions: int, like: Tensor) -> Bool[Tensor, "C N"]:
        """Return True if a position is the last in a compressed block."""
        last_C = last_positions(num_positions, self.config.block, self.config.stride, like.device)
        return last_C[:, None] == torch.arange(num_positions, device=like.device)


EXPORT = NativeSparseAttention


def blocks_of(x_BGNK: Tensor, length: int, stride: int) -> Float[Tensor, "B G C L K"]:
    """Return the blocks of ``length`` positions, one start per ``stride``, inside the sequence.

    A sequence shorter than one block gives one zero-padded, never complete block.

    Args:
        x_BGNK: (B, G, N, K).
        length: L, positions per block.
        stride: distance between starts.
    """
    missing = max(0, length - x_BGNK.shape[2])
    return F.pad(x_BGNK, (0, 0, 0, missing)).unfold(2, length, stride).mT


def last_positions(num_positions: int, length: int, stride: int, device: torch.device) -> Int64[Tensor, " C"]:
    """Return the position at which each block from `blocks_of` is complete.

    Args:
        num_positions: N.
        length: positions per block.
        stride: distance between starts.
        device: device for the result.
    """
    num_blocks = max(0, num_positions - length) // stride + 1
    return torch.arange(num_blocks, device=device) * stride + length - 1


def complete_blocks(
    num_positions: int, length: int, stride: int, mask_BN: Tensor | None, device: torch.device
) -> Bool[Tensor, "B 1 N C"]:
    """Return True if a block (fourth axis) is complete at a position (third).

    A complete block ends there or before, and has no padding.

    Args:
        num_positions: N.
        length: positions per block.
        stride: distance between starts.
        mask_BN: True at valid positions; None without padding.
        device: device for the result.

    Returns:
        (B, 1, N, C) booleans; B is 1 without padding.
    """
    last_C = last_positions(num_positions, length, stride, device)
    seen_NC = last_C <= torch.arange(num_positions, device=device)[:, None]
    if mask_BN is None:
        return seen_NC[None, None]
    whole_BC = F.pad(mask_BN, (0, max(0, length - num_positions))).unfold(1, length, stride).all(-1)
    return seen_NC & whole_BC[:, None, None]


class MeanOfBlocks(nn.Module):
    """Mean over each block, (B, G, C, L, K) → (B, G, C, K)."""

    def forward(self, blocks_BGCLK: Float[Tensor, "B G C L K"]) -> Float[Tensor, "B G C K"]:
        return blocks_BGCLK.mean(-2)


class LearnedCompression(nn.Module):
    """Learned compression, φ(x) = W₂ gelu(W₁ [x_1 + e_1; …; x_L + e_L] + b₁).

    W₁ (K, LK), b₁ and W₂ (K, K) are shared by all heads. e is the learned embedding for the place in a block, one per
    head, initially 0. W₂ has no bias: a constant for all blocks does not change a softmax over compressed keys.
    """

    def __init__(self, kv_heads: int, length: int, head_width: int):
        super().__init__()
        self.place_GLK = nn.Parameter(torch.zeros(kv_heads, length, head_width))
        self.hidden = nn.Linear(length * head_width, head_width)
        self.compressed = nn.Linear(head_width, head_width, bias=False)

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on the embeddings for the place in a block."""
        return {"place_GLK": False}

    def forward(self, blocks_BGCLK: Float[Tensor, "B G C L K"]) -> Float[Tensor, "B G C K"]:
        placed_BGCLK = blocks_BGCLK + self.place_GLK[:, None]
        return self.compressed(F.gelu(self.hidden(placed_BGCLK.flatten(-2))))
