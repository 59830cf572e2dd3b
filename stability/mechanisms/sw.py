"""`sw`: sliding-window softmax attention with rotary positions, computed on the band."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from stability.config.impl import Impl, Use
from stability.mechanisms._attention import AbstractSoftmaxAttention, DotProductSettings, attend, find_unsupported
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding
from stability.mechanisms._blocks import MIN_BLOCK, band_positions, bands, present, split_into_blocks


class SlidingWindowAttention(AbstractSoftmaxAttention):
    """Softmax attention from i to j with |i − j| ≤ w, or i − w ≤ j ≤ i if causal.

    RoPE on q and k (paper E: w = 2). With ``impl=reference`` queries are cut into blocks of c = max(w, 16); a block
    sees its own keys and w more on each side (causal: before it). Time and memory are O(N·(c + 2w)), linear in N,
    without an N × N mask. With ``impl=triton`` kernels compute the band (`kernels.band_attention`). Every position sees
    itself, so no softmax row is empty.
    """

    class Config(DotProductSettings):
        """Settings for the band."""

        window: int = Field(
            default=2, ge=1, description="positions seen on each side (causal: before), besides oneself"
        )
        impl: Impl = "reference"

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    kernels_second_order = True

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.impl = config.impl
        self.before, self.after = config.window, 0 if self.causal else config.window

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return find_unsupported(use) if config.softcap is None else f"softcap={config.softcap:g}"

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        one_side = sum(max(num_positions - offset, 0) for offset in range(1, min(config.window, num_positions) + 1))
        return num_positions + one_side * (1 if shape.direction == CAUSAL else 2)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count the last w positions: the next position sees them and itself.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        return shape.heads * min(num_positions, config.window)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend in query blocks, each to the keys in its band: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        if self.impl == "triton":
            from kernels.band_attention import band_attention

            y_BHNK = band_attention(q_BHNK, k_BHNK, v_BHNK, mask_BN, before=self.before, after=self.after)
            return self.joined(y_BHNK, x_BND)
        num_positions = x_BND.shape[1]
        before, after = self._reach(num_positions)
        block = max(before, MIN_BLOCK)
        q, k, v = split_into_blocks(q_BHNK, block), *(bands(part, block, before, after) for part in (k_BHNK, v_BHNK))
        visible = self._visible(num_positions, block, mask_BN, x_BND.device)
        if self.softcap is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=self.dropped)
        else:
            y = attend(q, k, v, visible, self.dropped, self.softcap)
        return self.joined(y.flatten(2, 3)[:, :, :num_positions], x_BND)

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N N"]:
        position_N = torch.arange(num_positions, device=device)
        offset_NN = position_N - position_N[:, None]
        return (offset_NN >= -self.before) & (offset_NN <= self.after)

    def _reach(self, num_positions: int) -> tuple[int, int]:
        """Return the band's reach before and after a query, at most the sequence length."""
        return min(self.before, num_positions), min(self.after, num_positions)

    def _visible(self, num_positions: int, block: int, mask_BN: Tensor | None, device: torch.device) -> Tensor:
        """Return the visible pairs, (blocks, block, before + block + after).

        With padding they have a leading (B, 1).
        """
        before, after = self._reach(num_positions)
        query, key = band_positions(num_positions, block, before, after, device)
        in_band = (key >= query - before) & (key <= query + after)
        return in_band & (present(key, num_positions, mask_BN) | (key == query))


EXPORT = SlidingWindowAttention
