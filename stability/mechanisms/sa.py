"""`sa`: multi-head softmax attention (Vaswani et al. 2017) with rotary positions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from stability.config.identity import Since
from stability.mechanisms._attention import (
    AbstractSoftmaxAttention,
    DotProductSettings,
    attend,
    require_groups,
    visible_pairs,
)
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding


class SoftmaxAttention(AbstractSoftmaxAttention):
    """Softmax self-attention: y_i = W_o Σ_j softmax_j(q̃_i·k̃_j / √K) v_j + b_o, per head.

    RoPE on q and k; j ≤ i if causal, j ≠ i with a masked diagonal. A row without keys has the empty sum, as in
    `attentionx`: y_i = b_o. With a masked diagonal this is the first position in a causal sequence, a single position,
    or a row whose other keys are all padding. With ``kv_heads`` a group of heads shares keys and values (grouped
    queries, Ainslie et al. 2023, arXiv:2305.13245, 2.2). For second derivatives call the model under
    ``sdpa_kernel(SDPBackend.MATH)``, since attention is torch's scaled_dot_product_attention.
    """

    class Config(DotProductSettings):
        """Settings for visible keys; width, heads and direction come from model and objective."""

        mask_diagonal: Annotated[bool, Since(False)] = Field(
            default=False,
            description="whether no position sees itself, as in attentionx's image models and in their baseline",
        )
        temperature: Annotated[Literal["fixed", "learned"], Since("fixed")] = Field(
            default="fixed", description="factor of q·k: 1/√K, or one that is learned for all heads and begins there"
        )
        kv_heads: Annotated[int | None, Since(None)] = Field(
            default=None,
            ge=1,
            description="heads of keys and values, each read by a group of query heads; divides the heads; null: all",
        )

    directions = frozenset({BIDIRECTIONAL, CAUSAL})

    @classmethod
    def kv_heads_of(cls, config: Any, heads: int) -> int:
        return heads if config.kv_heads is None else config.kv_heads

    @classmethod
    def reads_decays(cls, config: Any) -> bool:
        return True

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        require_groups(cls.__module__.rsplit(".", 1)[-1], config.kv_heads, heads)

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.mask_diagonal, self.decays = config.mask_diagonal, shape.decays
        if config.temperature == "learned":
            self.learn_temperature()

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        return self.joined(self._attend(q_BHNK, k_BHNK, v_BHNK, mask_BN), x_BND)

    def _attend(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return softmax(q̃k̃ᵀ/√K) v per head, (B, H, N, K), by torch's fused attention unless capped or decayed."""
        if self.mask_diagonal or self.softcap is not None or self.decays is not None:
            seen = visible_pairs(
                q_BHNK.shape[2], mask_BN, causal=self.causal, mask_diagonal=self.mask_diagonal, device=q_BHNK.device
            )
            return attend(q_BHNK, k_BHNK, v_BHNK, seen, self.dropped, self.softcap, self.decays)
        visible = None if mask_BN is None else self._visible(mask_BN)
        return F.scaled_dot_product_attention(
            q_BHNK, k_BHNK, v_BHNK, attn_mask=visible, is_causal=self.causal and visible is None, dropout_p=self.dropped
        )

    def _visible(self, mask_BN: Tensor) -> Tensor:
        """Return the visible pairs: True if a query (third axis) may see a key (fourth).

        No row is empty: torch's SDPA accepts empty rows, other softmaxes give NaN.
        """
        if not self.causal:
            return (mask_BN | ~mask_BN.any(-1, keepdim=True))[:, None, None]
        ones_NN = torch.ones(mask_BN.shape[1], mask_BN.shape[1], dtype=torch.bool, device=mask_BN.device)
        return (ones_NN.tril() & mask_BN[:, None, None]) | (ones_NN.tril() & ones_NN.triu())


EXPORT = SoftmaxAttention
