"""The same sigmoid attention, which exposes its weights."""

from __future__ import annotations

from torch import Tensor

from stability.mechanisms._base import without_padding
from stability.mechanisms._observed import AbstractAttention
from tests.mechanisms.plugins.unseen_sigmoid import SigmoidAttention


class SeenSigmoid(SigmoidAttention, AbstractAttention):
    rows_sum_to_one = False

    def parts(self, x_BND: Tensor) -> Tensor:
        """Queries, keys and values, (3, B, H, N, K)."""
        return self.qkv(x_BND).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        q_BHNK, k_BHNK, _ = self.parts(without_padding(x_BND, mask_BN))
        a_BHNN = (q_BHNK @ k_BHNK.mT / q_BHNK.shape[-1] ** 0.5).sigmoid()
        return a_BHNN if mask_BN is None else a_BHNN.masked_fill(~mask_BN[:, None, None], 0.0)

    def values(self, x_BND: Tensor) -> Tensor:
        return self.parts(x_BND)[2]


EXPORT = SeenSigmoid
