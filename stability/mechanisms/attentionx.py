"""`attentionx`: values minus γ times their softmax attention, with rotary positions.

This is the consensus discrepancy in AttentionX (Zhang and Heusdens).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from stability.config.identity import Since
from stability.mechanisms._attention import AbstractSoftmaxAttention, DotProductSettings, attend, visible_pairs
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding

GAMMA_WITH_DIAGONAL, GAMMA_WITHOUT = 3.0, 1.0  # the paper's nanoGPT (4.2) and its ViT (4.1)


class AttentionX(AbstractSoftmaxAttention):
    """Attention with output Φ_i = v_i − γ Σ_j softmax_j(q̃_i·k̃_j / √K) v_j per head.

    y_i = W_o Φ_i + b_o (Eqs. 10, 11). RoPE on q and k; j ≤ i if causal, j ≠ i with a masked diagonal. The softmax runs
    over unmasked keys, so its rows sum to 1. A row without keys has the empty sum, Φ_i = v_i: the first position in a
    causal sequence with a masked diagonal, a single position, or a row whose other keys are all padding. The parameters
    are those of `sa`.
    """

    class Config(DotProductSettings):
        """Settings for the subtracted term; null is the paper's recipe (3.2).

        The recipe is γ > 1 if a position attends to itself, γ = 1 if not.
        """

        gamma: float | None = Field(
            default=None,
            ge=0,
            description="γ, the weight of the attended values; null: 1 with a masked diagonal, 3 without",
        )
        mask_diagonal: bool | None = Field(
            default=None,
            description="whether no position sees itself; null: masked where bidirectional, seen where causal",
        )
        temperature: Annotated[Literal["fixed", "learned"], Since("fixed")] = Field(
            default="fixed", description="factor of q·k: 1/√K, or one that is learned for all heads and begins there"
        )

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    gamma: float | Tensor

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.mask_diagonal = not self.causal if config.mask_diagonal is None else config.mask_diagonal
        self.gamma = (
            config.gamma if config.gamma is not None else GAMMA_WITHOUT if self.mask_diagonal else GAMMA_WITH_DIAGONAL
        )
        if config.temperature == "learned":
            self.learn_temperature()

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        return self.joined(v_BHNK - self.gamma * self._attend(q_BHNK, k_BHNK, v_BHNK, mask_BN), x_BND)

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        """Return the discrepancy Φ = v − γAv."""
        return v_BHNK - self.gamma * (a_BHNN @ v_BHNK)

    def _attend(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return softmax(q̃k̃ᵀ/√K) v, zero in empty rows."""
        if mask_BN is None and not self.mask_diagonal and self.softcap is None:
            return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, is_causal=self.causal, dropout_p=self.dropped)
        visible = visible_pairs(
            q_BHNK.shape[2], mask_BN, causal=self.causal, mask_diagonal=self.mask_diagonal, device=q_BHNK.device
        )
        return attend(q_BHNK, k_BHNK, v_BHNK, visible, self.dropped, self.softcap)


EXPORT = AttentionX
