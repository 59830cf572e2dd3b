"""`fasa`: frequency-aware sparse attention, which selects keys by a few of RoPE's frequencies.

From Wang et al. 2026, arXiv:2602.03152.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._training_free import AbstractTrainingFree, Pairs, Variant
from stability.mechanisms.sa import SoftmaxAttention


class FrequencyAwareAttention(AbstractTrainingFree):
    """Softmax attention to the few keys with the best scores on dominant frequency chunks.

    A frequency chunk c is the pair of dimensions (c, c + K/2) rotated by RoPE at one rate, and q̃·k̃ = Σ_c q̃_c·k̃_c
    (FASA, 3 and 4). Token importance prediction: S_ij = Σ_c q̃_ic·k̃_jc over the head's dominant chunks; the ``tokens``
    largest among visible keys are kept. Focused attention: softmax over these, with all chunks. Dominant are the
    ``chunks`` with the largest mean contextual agreement, |TopK_j(q̃·k̃) ∩ TopK_j(q̃_c·k̃_c)| / K over the queries in
    some sequences. This is an explicit step: `agreement` on each sequence, then `calibrate` with the mean. The paper
    decodes, so a query sees only earlier keys. Here every query in a sequence selects on its own, and bidirectional
    queries see all keys.

    Without calibration all chunks must be scored. Keys tied at the threshold are all kept.
    """

    class Config(SoftmaxAttention.Config):
        """Settings for selection, in addition to those of the trained `sa`."""

        tokens: int | None = Field(default=None, ge=1, description="keys that a query attends to; null: all")
        chunks: int | None = Field(
            default=None, ge=1, description="dominant frequency chunks of a head, by a calibration; null: all"
        )
        agreement_tokens: int = Field(
            default=16,
            ge=1,
            description="K of the contextual agreement, at most half of the keys that a query sees",
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        if shape.rope is None:
            raise ValueError("fasa selects by the frequencies of RoPE, which this model does not have: position=rope")
        self.num_chunks = shape.head_width // 2
        self.tokens, self.agreement_tokens = config.tokens, config.agreement_tokens
        self.chunks = self.num_chunks if config.chunks is None else config.chunks
        if self.chunks > self.num_chunks:
            raise ValueError(
                f"mechanism.fasa.chunks={self.chunks}: a head of width {shape.head_width} has {self.num_chunks} "
                "frequency chunks"
            )
        whole = torch.ones(self.heads, self.num_chunks, dtype=torch.bool) if self.chunks == self.num_chunks else None
        self.register_buffer("dominant_HC", whole, persistent=False)

    dominant_HC: Tensor | None

    @classmethod
    def cost(cls, config: Config, shape: MixerShape, num_positions: int) -> float:
        """Count the whole of `sa`, and one product with D per predicted pair.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        predicted = 0 if config.tokens is None or config.tokens >= num_positions else num_positions**2 * shape.width
        return super().cost(config, shape, num_positions) + predicted

    @classmethod
    def variants(cls, config: Config, budgets: Sequence[float], shape: MixerShape, num_positions: int) -> list[Variant]:
        """Return the settings for each budget, the share of a sequence's positions to keep.

        If ``config`` has no number of chunks, variants use a quarter of the chunks, as in the paper, and all.

        Args:
            config: base settings.
            budgets: shares in (0, 1].
            shape: width, heads and direction.
            num_positions: sequence length N.
        """
        every = shape.head_width // 2
        numbers = (max(1, every // 4), every) if config.chunks is None else (config.chunks,)
        return [
            Variant(
                budget,
                f"{chunks} of {every} chunks",
                config.model_copy(update={"tokens": math.ceil(budget * num_positions), "chunks": chunks}),
            )
            for chunks in dict.fromkeys(numbers)
            for budget in budgets
        ]

    def pairs(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Pairs:
        visible = self._visible(q_BHNK.shape[2], mask_BN, q_BHNK.device)
        if self.tokens is None or self.tokens >= q_BHNK.shape[2]:
            scored = visible.expand(*q_BHNK.shape[:3], q_BHNK.shape[2])
        else:
            scores = self._scores(q_BHNK, k_BHNK).masked_fill(~visible, -math.inf)
            scored = visible & (scores >= scores.topk(self.tokens, -1).values[..., -1:])
        return Pairs(scored, scored)

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the smallest gap between the last kept score and the next one."""
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        if self.tokens is None or self.tokens >= x_BND.shape[1]:
            return torch.tensor(math.inf)
        visible = self._visible(x_BND.shape[1], mask_BN, x_BND.device)
        scores = self._scores(q_BHNK, k_BHNK).masked_fill(~visible, -math.inf)
        last, following = scores.topk(self.tokens + 1, -1).values[..., -2:].unbind(-1)
        asks = self._valid(x_BND.shape[1], mask_BN, x_BND.device)[:, None]
        return (last - following).where(following.isfinite() & asks, math.inf).min()

    @torch.no_grad()
    def agreement(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "H C"]:
        """Return each frequency chunk's mean contextual agreement with the whole head.

        The mean is over valid queries with a visible key.
        """
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        visible = self._visible(x_BND.shape[1], mask_BN, x_BND.device)
        asks_BN = self._valid(x_BND.shape[1], mask_BN, x_BND.device) & visible[:, 0].any(-1)
        num_top = ((visible.sum(-1, keepdim=True) + 1) // 2).clamp(max=self.agreement_tokens)
        whole = _tops(q_BHNK @ k_BHNK.mT, visible, num_top)
        q_BHNTC, k_BHNTC = (part.unflatten(-1, (2, -1)) for part in (q_BHNK, k_BHNK))
        by_chunk = []
        for chunk in range(self.num_chunks):
            scores = q_BHNTC[..., chunk] @ k_BHNTC[..., chunk].mT
            shared_BHN = (whole & _tops(scores, visible, num_top)).sum(-1).double() / num_top.clamp(min=1)[..., 0]
            of_asking = shared_BHN.movedim(1, 0).where(asks_BN, 0.0).sum((1, 2))
            by_chunk.append(of_asking / asks_BN.expand(len(x_BND), -1).sum().clamp(min=1))
        return torch.stack(by_chunk, -1)

    @torch.no_grad()
    def calibrate(self, agreement_HC: Tensor) -> None:
        """Choose as dominant the chunks with the largest agreement, per head."""
        rank_HC = agreement_HC.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        self.dominant_HC = (rank_HC < self.chunks).to(self.out.weight.device)

    def _scores(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        """Return S for all pairs, visible or not, (B, H, N, N), by dominant chunks only."""
        if self.dominant_HC is None:
            raise ValueError(
                f"fasa with {self.chunks} of {self.num_chunks} frequency chunks does not know which: calibrate it first"
            )
        dominant_H1K = self.dominant_HC.repeat(1, 2)[:, None].to(q_BHNK.dtype)
        return (q_BHNK * dominant_H1K) @ k_BHNK.mT


def _tops(scores: Tensor, visible: Tensor, num_top: Tensor) -> Tensor:
    """Return True at each row's ``num_top`` (…, N, 1) highest visible scores."""
    rank = scores.masked_fill(~visible, -math.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (rank < num_top) & visible


EXPORT = FrequencyAwareAttention
