"""`longformer`: softmax attention to a window, possibly dilated, and a few global tokens, with rotary positions.

From Beltagy et al. 2020.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.config.impl import Impl, Use
from stability.mechanisms._attention import QKNormSettings, attend, find_unsupported, prepare
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding
from stability.mechanisms._blocks import (
    MIN_BLOCK,
    band_positions,
    bands,
    even_block,
    merge_classes,
    present,
    split_into_blocks,
    split_into_classes,
)
from stability.mechanisms._observed import AbstractAttention


class LongformerAttention(AbstractAttention):
    """Softmax attention from position i to {i + d·m: |m| ≤ w} and the first g positions.

    The first g positions, the global tokens, see everything, through separate projections Q_g, K_g, V_g next to Q_s,
    K_s, V_s (Beltagy et al. 2020, arXiv:2004.05150, 3.1: window w on each side, dilation d). RoPE on both pairs of q
    and k.

    A global token is a key for the others by K_s and V_s, once, even inside a window. Q_g, K_g and V_g start as copies
    of the others (3.1), unless the model's initialisation redraws weights. The paper's causal form has no global tokens
    (4.1). Here no causal row sees everything: a global token is a key for later positions and otherwise an ordinary
    query, without second projections.

    Positions with equal remainder by d form a separate sequence, and queries are processed in blocks, as in `sw`. Time
    and memory are O(N·(c + 2w + g)), with blocks of c about max(w, 16), plus O(g·N) for global rows.
    """

    class Config(QKNormSettings):
        """Width and dilation of the band, and number of global tokens."""

        window: int = Field(default=2, ge=1, description="w: keys on each side (causal: before), besides oneself")
        dilation: int = Field(default=1, ge=1, description="d: distance between two keys of the window")
        global_tokens: int = Field(
            default=1, ge=0, description="g: first positions, that all see and that see all (causal: that all see)"
        )
        impl: Impl = "reference"

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    kernels_second_order = True
    rows_sum_to_one = True

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        if shape.rope is not None:
            shape.require_pairs()
        self.config, self.rope, self.heads = config, shape.rope, shape.heads
        self.causal, self.dropout = shape.direction == CAUSAL, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.q_norm, self.k_norm = config.make_norms(shape.head_width)
        self.q_global = self.kv_global = None
        if has_global_rows(config, shape):
            self.q_global, self.kv_global = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, 2 * shape.width)
            with torch.no_grad():
                for copy, rows in ((self.q_global, slice(shape.width)), (self.kv_global, slice(shape.width, None))):
                    copy.weight.copy_(self.qkv.weight[rows])
                    copy.bias.copy_(self.qkv.bias[rows])

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` is three matrices, ``kv_global`` two."""
        width = self.qkv.in_features
        return {"qkv": (width,) * 3} | ({} if self.kv_global is None else {"kv_global": (width,) * 2})

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        for name in ("dilation", "global_tokens"):
            if getattr(config, name) >= num_positions:
                value = getattr(config, name)
                raise ValueError(f"mechanism.longformer.{name}={value} must be below model.positions={num_positions}")

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return find_unsupported(use)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections and two products with D per pair.

        Q_s of global rows is unused and not counted. Masked pairs in a block count, up to two thirds of the block.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        width, few, causal = shape.width, min(config.global_tokens, num_positions), shape.direction == CAUSAL
        pairs, linear = few * (few if causal else num_positions), 4 * num_positions * width**2
        if num_positions > few:
            block = _block(config, num_positions - few)
            in_class = -(-(num_positions - few) // config.dilation)
            rows = config.dilation * block * -(-in_class // block)
            pairs += rows * (few + block + min(config.window, in_class) * (1 if causal else 2))
        if has_global_rows(config, shape):
            linear += 2 * num_positions * width**2
        return float(linear + 2 * pairs * width)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count the global tokens and the last d·w other positions: w per remainder by d.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        few = min(config.global_tokens, num_positions)
        return shape.heads * (few + min(num_positions - few, config.dilation * config.window))

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, as in `sa`; global rows are unchanged."""
        self.qkv.bias[: 2 * self.qkv.in_features] = bias

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend from global tokens, and from others in windows: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        num_positions, few = x_BND.shape[1], self.config.global_tokens
        q_BHNK, k_BHNK, v_BHNK = self._heads(self.qkv(x_BND), 3)
        parts = []
        if few:
            key = torch.arange(min(few, num_positions) if self.causal else num_positions, device=x_BND.device)
            seen = present(key[None], num_positions, mask_BN)
            if self.causal:
                q, k, v = (part[:, :, :few] for part in (q_BHNK, k_BHNK, v_BHNK))
                seen = seen & (key <= key[:, None])
            else:
                q, k, v = self._global_heads(x_BND)
            parts.append(attend(q, k, v, seen, self.dropped))
        if num_positions > few:
            parts.append(self._attend_near(q_BHNK[:, :, few:], k_BHNK, v_BHNK, mask_BN))
        return self.joined(torch.cat(parts, 2), x_BND)

    @property
    def dropped(self) -> float:
        """Dropout rate of attention weights now: 0 outside training mode."""
        return self.dropout if self.training else 0.0

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        """Return the attention weights.

        Rows of global tokens are a softmax by their own projections over all keys; other rows, over band and global
        tokens.
        """
        x_BND = without_padding(x_BND, mask_BN)
        key, few = torch.arange(x_BND.shape[1], device=x_BND.device), self.config.global_tokens
        ahead = key - key[:, None]
        in_window = (ahead % self.config.dilation == 0) & (ahead.abs() <= self.config.dilation * self.config.window)
        seen = (in_window | (key < few)) & ((ahead <= 0) | (not self.causal)) & present(key[None], len(key), mask_BN)
        q_BHNK, k_BHNK, _ = self._heads(self.qkv(x_BND), 3)
        a_BHNN = _softmax(q_BHNK, k_BHNK, seen)
        if self.q_global is None:
            return a_BHNN
        q_BHGK, k_BHNK, _ = self._global_heads(x_BND)
        of_global = _softmax(q_BHGK, k_BHNK, present(key[None], len(key), mask_BN))
        return torch.cat([of_global, a_BHNN[:, :, of_global.shape[2] :]], 2)

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        """Return V_s; with global rows, V_s and V_g concatenated, (B, H, N, 2K)."""
        v_BHNK = self._heads(self.qkv(x_BND), 3)[2]
        return v_BHNK if self.q_global is None else torch.cat([v_BHNK, self._global_heads(x_BND)[2]], -1)

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        """Return A V_s, and A V_g in the global rows."""
        if self.q_global is None:
            return a_BHNN @ v_BHNK
        own, of_global = v_BHNK.chunk(2, -1)
        few = self.config.global_tokens
        return torch.cat([a_BHNN[..., :few, :] @ of_global, a_BHNN[..., few:, :] @ own], -2)

    def _attend_near(self, q_BHMK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the attention output for the M positions after the global tokens.

        Windows exclude global tokens: they are windows of the sequence after these.
        """
        num_near, few, dilation = q_BHMK.shape[2], self.config.global_tokens, self.config.dilation
        before = min(self.config.window, -(-num_near // dilation))  # beyond that only zeros
        after = 0 if self.causal else before
        if self.config.impl == "triton":
            from kernels.band_attention import band_attention

            seen = {"before": before, "after": after, "dilation": dilation, "global_keys": few, "own": False}
            return band_attention(q_BHMK, k_BHNK, v_BHNK, mask_BN, **seen)
        block = _block(self.config, num_near)
        query, key = band_positions(-(-num_near // dilation), block, before, after, q_BHMK.device)
        in_window = (key >= query - before) & (key <= query + after)
        # map places in a class of equal remainder, (G, 1, keys), to sequence positions, (d, G, 1, keys)
        place = key * dilation + torch.arange(dilation, device=key.device)[:, None, None, None]
        seen = in_window & present(place, num_near, None if mask_BN is None else mask_BN[:, few:])
        to_global = present(torch.arange(few, device=key.device), k_BHNK.shape[2], mask_BN)[..., None, None, None, :]
        seen = torch.cat([to_global.expand(*seen.shape[:-1], few), seen], -1)
        k, v = (self._windows(part, block, before, after) for part in (k_BHNK, v_BHNK))
        y = attend(split_into_blocks(split_into_classes(q_BHMK, dilation), block), k, v, seen, self.dropped)
        return merge_classes(y.flatten(3, 4), num_near)

    def _windows(self, of_all: Tensor, block: int, before: int, after: int) -> Tensor:
        """Return each block's visible entries of (B, H, N, K): global tokens, then band, (B, H, d, G, keys, K)."""
        few = self.config.global_tokens
        near = bands(split_into_classes(of_all[:, :, few:], self.config.dilation), block, before, after)
        first = of_all[:, :, None, None, :few].expand(*near.shape[:4], -1, -1)
        return torch.cat([first, near], -2)

    def _heads(self, projected_BND: Tensor, num_parts: int) -> list[Tensor]:
        """Return the parts by head, (B, H, N, K) each, all normed and rotated except values.

        The parts are q, k, v, or k, v, or q alone. Both pairs of q and k have the same norms.
        """
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected_BND.chunk(num_parts, -1)]
        norms = {3: (self.q_norm, self.k_norm), 2: (self.k_norm,), 1: (self.q_norm,)}[num_parts]
        turned = [prepare(part, norm, self.rope) for part, norm in zip(parts, norms, strict=False)]
        return [*turned, *parts[len(turned) :]]

    def _global_heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q_g for global tokens, (B, H, g, K), and K_g, V_g for all positions."""
        assert self.q_global is not None and self.kv_global is not None
        (q_BHGK,) = self._heads(self.q_global(x_BND[:, : self.config.global_tokens]), 1)
        k_BHNK, v_BHNK = self._heads(self.kv_global(x_BND), 2)
        return q_BHGK, k_BHNK, v_BHNK


def has_global_rows(config: Any, shape: MixerShape) -> bool:
    """Return whether some queries see everything."""
    return config.global_tokens > 0 and shape.direction != CAUSAL


def _block(config: Any, num_near: int) -> int:
    """Return the number of queries per block, among those with equal remainder."""
    return even_block(-(-num_near // config.dilation), max(config.window, MIN_BLOCK))


def _softmax(q_BHNK: Tensor, k_BHNK: Tensor, seen: Tensor) -> Tensor:
    """Return the weights over visible keys, zero in empty rows."""
    logits = q_BHNK @ k_BHNK.mT / math.sqrt(q_BHNK.shape[-1])
    return logits.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)


EXPORT = LongformerAttention
