"""Mechanisms with one planted fault each of what a position may see, which short sequences, gradients or padding at the
ends alone do not show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.mechanisms.faults import Mean


class LeaksFutureInALaterBlock(Mean):
    """The last position of a block of 4 sees the next block's first, but for the first two blocks."""

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        position_N = torch.arange(x_BND.shape[1])
        starts_N = (position_N >= 12) & (position_N % 4 == 0)
        return super().visible(x_BND, mask_BN) | (starts_N & (position_N == position_N[:, None] + 1))


class SelectsByTheFuture(Mean):
    """Reads the past by those positions that are above the mean of the whole sequence, which has no gradient."""

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        score_BN = x_BND.mean(-1)
        chosen_BNN = (score_BN > score_BN.mean(1, keepdim=True))[:, None]
        diagonal_NN = torch.eye(x_BND.shape[1], dtype=torch.bool)
        return super().visible(x_BND, mask_BN) & (chosen_BNN | diagonal_NN | diagonal_NN.roll(-1, 1))


class ForgetsThePastAtALaterBlock(Mean):
    """No position sees beyond its block of 16."""

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        block_N = torch.arange(x_BND.shape[1]) // 16
        return super().visible(x_BND, mask_BN) & (block_N == block_N[:, None])


class ReadsPaddingInALaterBlock(Mean):
    """Padding beyond the first block of 16 is read."""

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        if mask_BN is not None:
            mask_BN = mask_BN | (torch.arange(x_BND.shape[1]) >= 16)
        return super().forward(x_BND, mask_BN=mask_BN)


class ReadsPaddingAfterTwoGaps(Mean):
    """Takes a sequence to be padded in two places at most."""

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        if mask_BN is not None and mask_BN.shape[1] > 1:
            num_changes_BN = (mask_BN[:, 1:] != mask_BN[:, :-1]).cumsum(1)
            mask_BN = mask_BN | functional.pad(num_changes_BN > 4, (1, 0))
        return super().forward(x_BND, mask_BN=mask_BN)


class EmptyBlocks(Mean):
    """The third block of 4 has nothing to take a mean of where it is all padding."""

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        y_BND = super().forward(x_BND, mask_BN=mask_BN)
        if mask_BN is None or mask_BN.shape[1] < 12:
            return y_BND
        valid_B = mask_BN[:, 8:12].sum(1)
        return y_BND + 0 * (torch.where(mask_BN[..., None], x_BND, 0.0)[:, 8:12].sum(1) / valid_B[:, None])[:, None]
