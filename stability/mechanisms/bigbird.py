"""`bigbird`: block-sparse softmax attention with near, random and global blocks, and rotary positions.

From Zaheer et al. 2020.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from stability.mechanisms._attention import AbstractSoftmaxAttention, DotProductSettings, attend
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding
from stability.mechanisms._blocks import present, split_into_blocks

NONE = -1  # filler for a query block with fewer key blocks than others


class BigBirdAttention(AbstractSoftmaxAttention):
    """Softmax attention from blocks of b positions to near, random and global blocks.

    A block sees itself, w blocks on each side, r random blocks and the first g blocks. These g global blocks see
    everything. This is the internal construction "ITC", with global positions inside the sequence (Zaheer et al. 2020,
    arXiv:2007.14062, section 2 and appendix D). RoPE on q and k.

    Random links exclude near and global blocks and are the same for all heads. They are drawn from (``link_seed``,
    layer, query block), not from the module's or the data's generator, and never anew in a forward pass. The paper is
    not causal. In the causal form links point only to earlier blocks, so they do not depend on later ones; global
    blocks are keys for later positions, and j ≤ i applies within a block. Bidirectional links depend on the number of
    blocks.

    A query block sees at most g + 2w + 1 + r blocks (causal: g + w + 1 + r), gathered next to it. Time and memory are
    O(N·b·(g + 2w + 1 + r)), linear in N, plus O(g·b·N) for global rows.
    """

    class Config(DotProductSettings):
        """Block size, and number of visible blocks of each kind."""

        block: int = Field(default=4, ge=1, description="b: positions in a block")
        window: int = Field(
            default=1, ge=0, description="w: blocks seen on each side (causal: before), besides its own"
        )
        random: int = Field(default=1, ge=0, description="r: further blocks that each block sees, drawn at random")
        global_blocks: int = Field(
            default=1, ge=0, description="g: first blocks, that all see and that see all (causal: that all see)"
        )
        link_seed: int = Field(default=0, ge=0, description="what the links are drawn from, beside the layer's number")

    directions = frozenset({BIDIRECTIONAL, CAUSAL})

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.config: Any = config
        self.layer = shape.layer

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        for name, least in (("block", config.block), ("global_blocks", config.global_blocks * config.block)):
            if least > num_positions:
                what = "" if name == "block" else f" of {config.block} positions"
                raise ValueError(
                    f"mechanism.bigbird.{name}={getattr(config, name)}{what} must fit in model.positions="
                    f"{num_positions}"
                )

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the pairs in gathered blocks and global rows, masked ones included.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: N.
        """
        num_blocks, causal = -(-num_positions // config.block), shape.direction == CAUSAL
        plan = block_links(config, shape.layer, causal, num_blocks)
        gathered = sum(map(len, plan)) * config.block**2
        return gathered + min((num_blocks - len(plan)) * config.block, num_positions) * num_positions

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count the global blocks and the near positions, or all positions with random links.

        Near positions start at the first of the w blocks before the next position's block. With random links a future
        block may link to any block.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: positions read so far.
        """
        near_from = max(num_positions // config.block - config.window, 0) * config.block
        far = 0 if config.random else max(near_from - config.global_blocks * config.block, 0)
        return shape.heads * (num_positions - far)

    def links(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Return the visible key blocks per query block, in order, without filler.

        Global rows come first and see all blocks.
        """
        plan = block_links(self.config, self.layer, self.causal, num_blocks)
        whole = (tuple(range(num_blocks)),) * (num_blocks - len(plan))
        return whole + tuple(tuple(key for key in row if key != NONE) for row in plan)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend from blocks to their visible blocks, and from global rows to everything."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        num_positions, block = x_BND.shape[1], self.config.block
        num_blocks = -(-num_positions // block)
        plan = block_links(self.config, self.layer, self.causal, num_blocks)
        num_global = min((num_blocks - len(plan)) * block, num_positions)
        parts = []
        if num_global:
            seen = present(torch.arange(num_positions, device=x_BND.device)[None], num_positions, mask_BN)
            parts.append(attend(q_BHNK[:, :, :num_global], k_BHNK, v_BHNK, seen, self.dropped, self.softcap))
        if plan:
            parts.append(self._attend_blocks(q_BHNK, k_BHNK, v_BHNK, plan, mask_BN))
        return self.joined(torch.cat(parts, 2), x_BND)

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N N"]:
        block = self.config.block
        num_blocks = -(-num_positions // block)
        rows = [[key in row for key in range(num_blocks)] for row in self.links(num_blocks)]
        of_blocks = torch.tensor(rows, device=device).repeat_interleave(block, 0).repeat_interleave(block, 1)
        visible_NN = of_blocks[:num_positions, :num_positions]
        return visible_NN.tril() if self.causal else visible_NN

    def _attend_blocks(
        self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, plan: tuple[tuple[int, ...], ...], mask_BN: Tensor | None
    ) -> Tensor:
        """Return the attention output for query blocks in ``plan``: the last positions, (B, H, M, K)."""
        num_positions, block = q_BHNK.shape[2], self.config.block
        first = -(-num_positions // block) - len(plan)
        plan_GJ = torch.tensor(plan, device=q_BHNK.device)
        within = torch.arange(block, device=q_BHNK.device)
        key = (plan_GJ[..., None] * block + within).flatten(1)[:, None]  # (G, 1, J·b), negative at filler
        seen = present(key, num_positions, mask_BN)
        if self.causal:
            query = (torch.arange(len(plan), device=q_BHNK.device)[:, None] + first) * block + within
            seen = seen & (key <= query[..., None])
        k, v = (_gather_blocks(split_into_blocks(part, block), plan_GJ) for part in (k_BHNK, v_BHNK))
        y = attend(split_into_blocks(q_BHNK, block)[:, :, first:], k, v, seen, self.dropped, self.softcap)
        return y.flatten(2, 3)[:, :, : num_positions - first * block]


def _gather_blocks(k_BHMbK: Tensor, plan_GJ: Tensor) -> Tensor:
    """Gather the listed key blocks, (B, H, M, b, K) → (B, H, G, J·b, K); arbitrary at filler."""
    chosen = k_BHMbK.index_select(2, plan_GJ.clamp_min(0).flatten())
    return chosen.unflatten(2, tuple(plan_GJ.shape)).flatten(3, 4)


@lru_cache(maxsize=256)
def block_links(config: Any, layer: int, causal: bool, num_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Return the key blocks for each query block that does not see everything.

    If there are global rows these are the last query blocks.

    Args:
        config: the mechanism's settings.
        layer: index from 0.
        causal: whether links point only to earlier blocks.
        num_blocks: blocks in the sequence.

    Returns:
        Ordered lists, padded with `NONE` to equal length.
    """
    first = 0 if causal else min(config.global_blocks, num_blocks)
    rows = [_row(config, layer, causal, num_blocks, block) for block in range(first, num_blocks)]
    longest = max(map(len, rows), default=0)
    return tuple(row + (NONE,) * (longest - len(row)) for row in rows)


def _row(config: Any, layer: int, causal: bool, num_blocks: int, block: int) -> tuple[int, ...]:
    """Return the sorted key blocks for one query block: near, global and random."""
    end = block + 1 if causal else num_blocks
    near = range(max(block - config.window, 0), min(block + config.window + 1, end))
    seen = sorted({*near, *range(min(config.global_blocks, end))})
    # Python guarantees equal draws for a string seed in every release; numpy and torch do not
    draws = random.Random(f"bigbird {config.link_seed} {layer} {block}")
    for _ in range(min(config.random, end - len(seen))):
        link = int(draws.random() * (end - len(seen)))  # index among blocks not visible yet
        for other in seen:
            link += link >= other
        seen = sorted([*seen, link])
    return tuple(seen)


EXPORT = BigBirdAttention
