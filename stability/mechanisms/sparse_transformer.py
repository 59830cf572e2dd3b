"""`sparse_transformer`: factorised softmax attention with rotary positions (Child et al. 2019).

Some heads see near positions, others far ones.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor

from stability.mechanisms._attention import AbstractSoftmaxAttention, DotProductSettings, attend
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


class SparseTransformerAttention(AbstractSoftmaxAttention):
    """Softmax attention to near keys in half of the heads, to far keys in the rest.

    The half is rounded up. The key sets are A⁽¹⁾ and A⁽²⁾ in Child et al. 2019, arXiv:1904.10509, 4.3, each in
    separate heads as in 5.1. RoPE on q and k.

    With the stride l, ``pattern=strided`` has A⁽¹⁾_i = {max(0, i − l), …, i} and A⁽²⁾_i = {j ≤ i: (i − j) mod l = 0}.
    ``pattern=fixed`` has A⁽¹⁾_i = {j ≤ i: ⌊j/l⌋ = ⌊i/l⌋} and A⁽²⁾_i = {j ≤ i: j mod l ≥ l − c}, with c = ``summary``
    last positions per block. In the fixed A⁽²⁾ the first l − c positions have no key: the empty sum. The paper is
    causal; the bidirectional form has the same sets without j ≤ i, and |i − j| ≤ l for the first.

    A head computes O(N·l) near pairs or O(N²/l) far ones (fixed: times c), so l ≈ √N gives N√N; no tensor is N × N.
    ``stride`` does not adapt to N, since padding must not change a sequence's result.
    """

    class Config(DotProductSettings):
        """Settings for far positions."""

        pattern: Literal["strided", "fixed"] = Field(
            default="strided",
            description="far keys: strided: those at multiples of the stride; fixed: the last ones of every block",
        )
        stride: int = Field(
            default=4, ge=2, description="l: near keys on each side, and distance of far ones; best near √N"
        )
        summary: int = Field(
            default=1, ge=1, description="c, of pattern=fixed only: last positions of a block that all heads of it see"
        )

        @model_validator(mode="after")
        def _summary_is_a_part_of_a_block(self) -> Any:
            if self.summary > self.stride:
                raise ValueError(f"summary={self.summary} must be at most stride={self.stride}, a block's length")
            return self

    directions = frozenset({BIDIRECTIONAL, CAUSAL})

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.config, self.num_near = config, num_near(shape.heads)

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        if heads < 2:
            raise ValueError(f"mechanism.sparse_transformer has two kinds of heads and needs at least 2; heads={heads}")

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        if config.stride > num_positions:
            raise ValueError(
                f"mechanism.sparse_transformer.stride={config.stride} must be at most model.positions={num_positions}"
            )

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the mean number of computed pairs per head.

        Masked pairs count: up to two thirds of a band, about half of the far pairs if causal.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        stride, summary = config.stride, config.summary
        num_blocks = -(-num_positions // stride)
        if config.pattern == "strided":
            block = even_block(num_positions, max(stride, MIN_BLOCK))
            seen = block + stride * (1 if shape.direction == CAUSAL else 2)
            near, far = -(-num_positions // block) * block * seen, stride * num_blocks**2
        else:
            near, far = num_blocks * stride**2, num_positions * num_blocks * summary
        share = num_near(shape.heads) / shape.heads
        return share * near + (1 - share) * far

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count the stored keys of near heads and of far heads.

        Near heads store the last l (fixed: those in the incomplete block), far heads every position (fixed: the last c
        per block).

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        stride, near_heads = config.stride, num_near(shape.heads)
        if config.pattern == "strided":
            near, far = min(num_positions, stride), num_positions
        else:
            full, near = divmod(num_positions, stride)
            far = full * config.summary + max(near - (stride - config.summary), 0)
        return near_heads * near + (shape.heads - near_heads) * far

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Attend near in the first heads, far in the others: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        qkv_BHNK = self.split(self.qkv(x_BND))
        first, last = [part[:, : self.num_near] for part in qkv_BHNK], [part[:, self.num_near :] for part in qkv_BHNK]
        if self.config.pattern == "strided":
            of_near, of_far = self._band(first, mask_BN), self._attend_strided(last, mask_BN)
        else:
            of_near, of_far = self._block(first, mask_BN), self._summaries(last, mask_BN)
        return self.joined(torch.cat([of_near, of_far], 1), x_BND)

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "H N N"]:
        """Return the visible pairs per head, (H, N, N)."""
        key, stride = torch.arange(num_positions, device=device), self.config.stride
        query = key[:, None]
        if self.config.pattern == "strided":
            near, far = (query - key).abs() <= stride, (query - key) % stride == 0
        else:
            near = query // stride == key // stride
            far = (key % stride >= stride - self.config.summary).expand_as(near)
        kinds_2NN = torch.stack([near, far])
        kinds_2NN = kinds_2NN.tril() if self.causal else kinds_2NN
        return kinds_2NN[(torch.arange(self.heads, device=device) >= self.num_near).long()]

    def _band(self, qkv_BHNK: list[Tensor], mask_BN: Tensor | None) -> Tensor:
        """Attend to the last l positions (bidirectional: also the next l), (B, H, N, K)."""
        q_BHNK, k_BHNK, v_BHNK = qkv_BHNK
        num_positions, before = q_BHNK.shape[2], self.config.stride
        block, after = even_block(num_positions, max(before, MIN_BLOCK)), 0 if self.causal else before
        query, key = band_positions(num_positions, block, before, after, q_BHNK.device)
        seen = (key >= query - before) & (key <= query + after) & present(key, num_positions, mask_BN)
        k, v = (bands(part, block, before, after) for part in (k_BHNK, v_BHNK))
        y = attend(split_into_blocks(q_BHNK, block), k, v, seen, self.dropped, self.softcap)
        return y.flatten(2, 3)[:, :, :num_positions]

    def _attend_strided(self, qkv_BHNK: list[Tensor], mask_BN: Tensor | None) -> Tensor:
        """Attend to every l-th position: those with equal remainder form a separate sequence."""
        num_positions, stride = qkv_BHNK[0].shape[2], self.config.stride
        position = torch.arange(stride * -(-num_positions // stride), device=qkv_BHNK[0].device)
        key = position.unflatten(0, (-1, stride)).mT[:, None]  # (l, 1, L)
        seen = present(key, num_positions, mask_BN)
        if self.causal:
            seen = seen & (key <= key.mT)
        q, k, v = (split_into_classes(part, stride) for part in qkv_BHNK)
        y = attend(q, k, v, seen, self.dropped, self.softcap)
        return merge_classes(y, num_positions)

    def _block(self, qkv_BHNK: list[Tensor], mask_BN: Tensor | None) -> Tensor:
        """Attend to the own block."""
        num_positions, stride = qkv_BHNK[0].shape[2], self.config.stride
        query, key = band_positions(num_positions, stride, 0, 0, qkv_BHNK[0].device)
        seen = present(key, num_positions, mask_BN)
        if self.causal:
            seen = seen & (key <= query)
        q, k, v = (split_into_blocks(part, stride) for part in qkv_BHNK)
        y = attend(q, k, v, seen, self.dropped, self.softcap)
        return y.flatten(2, 3)[:, :, :num_positions]

    def _summaries(self, qkv_BHNK: list[Tensor], mask_BN: Tensor | None) -> Tensor:
        """Attend to every block's last c positions; all queries share these few keys."""
        q_BHNK, k_BHNK, v_BHNK = qkv_BHNK
        num_positions, stride = q_BHNK.shape[2], self.config.stride
        first = stride - self.config.summary
        _, position = band_positions(num_positions, stride, 0, 0, q_BHNK.device)
        key = position[:, :, first:].flatten()
        seen = present(key[None], num_positions, mask_BN)
        if self.causal:
            seen = seen & (key <= torch.arange(num_positions, device=key.device)[:, None])
        k, v = (split_into_blocks(part, stride)[..., first:, :].flatten(2, 3) for part in (k_BHNK, v_BHNK))
        return attend(q_BHNK, k, v, seen, self.dropped, self.softcap)


def num_near(heads: int) -> int:
    """Return the number of heads with near keys: half of them, rounded up."""
    return -(-heads // 2)


EXPORT = SparseTransformerAttention
