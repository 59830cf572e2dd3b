"""`attentionx`: values minus γ times their softmax attention, the consensus discrepancy of AttentionX (Zhang and
Heusdens), with rotary positions."""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.config.identity import Since
from stability.mechanisms._attention import AbstractSoftmaxAttention, attended, visible_pairs
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding

GAMMA_WITH_DIAGONAL, GAMMA_WITHOUT = 3.0, 1.0  # the paper's nanoGPT (4.2) and its ViT (4.1)


class AttentionX(AbstractSoftmaxAttention):
    """Attention whose output is each value less what it attends to: y_i = W_o Φ_i + b_o with Φ_i = v_i − γ Σ_j
    softmax_j(q̃_i·k̃_j / √K) v_j per head (Eqs. 10, 11); RoPE on q and k; j ≤ i where causal, j ≠ i where the diagonal
    is masked.

    The softmax runs over what is left after masking, so its rows sum to 1. A row with nothing left (the first position
    of a causal sequence with a masked diagonal, one position alone, a row whose other keys are all padding) has the
    empty sum: Φ_i = v_i. The parameters are those of `sa`.
    """

    class Config(Settings):
        """Settings of what is subtracted; null takes the paper's recipe, γ > 1 where a position sees itself and γ = 1
        where it does not (3.2)."""

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
        return self.joined(v_BHNK - self.gamma * self._attended(q_BHNK, k_BHNK, v_BHNK, mask_BN), x_BND)

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        """Return the discrepancy Φ = v − γAv."""
        return v_BHNK - self.gamma * (a_BHNN @ v_BHNK)

    def _attended(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return softmax(q̃k̃ᵀ/√K) v, zero in rows that see nothing."""
        if mask_BN is None and not self.mask_diagonal:
            return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, is_causal=self.causal, dropout_p=self.dropped)
        visible = visible_pairs(
            q_BHNK.shape[2], mask_BN, causal=self.causal, mask_diagonal=self.mask_diagonal, device=q_BHNK.device
        )
        return attended(q_BHNK, k_BHNK, v_BHNK, visible, self.dropped)


EXPORT = AttentionX
