"""`ca`: multi-head softmax cross-attention (Vaswani et al. 2017) with rotary positions."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._attention import QKNormSettings, prepare
from stability.mechanisms._base import AbstractCrossMechanism, MixerShape, require_context, without_padding


class CrossAttention(AbstractCrossMechanism):
    """Softmax attention from a source to a context, per head.

    y_i = W_o Σ_j softmax_j(q̃_i·k̃_j / √K) v_j + b_o, with q from the source x, and k and v from the context c. Each
    side has its own positions 0, 1, …. A source with an empty or all-padded context gets 0, not b_o. For second
    derivatives call the model under ``sdpa_kernel(SDPBackend.MATH)``, since attention is torch's
    scaled_dot_product_attention.
    """

    class Config(QKNormSettings):
        """Setting for positions; width and heads come from the model."""

        rope: Literal["absolute", "none"] = Field(
            default="absolute",
            description="whether q and k are rotated by their positions in source and context (with position=rope)",
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.rope = shape.rope if config.rope == "absolute" else None
        if self.rope is not None:
            shape.require_pairs()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.q_norm, self.k_norm = config.make_norms(shape.head_width)
        self.q = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``kv`` is two matrices: keys and values."""
        return {"kv": (self.kv.in_features,) * 2}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, so that scores fall with distance under RoPE.

        As in self-attention (`AbstractSoftmaxAttention.start_local`).
        """
        self.q.bias.fill_(bias)
        self.kv.bias[: self.q.out_features] = bias

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int, num_context: int) -> float:
        return float(2 * (num_positions + num_context) * shape.width**2 + 2 * num_positions * num_context * shape.width)

    def forward(
        self,
        x_BND: Float[Tensor, "B N D"],
        context_BJD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return the attention output for each source position, (B, N, D).

        Args:
            x_BND: source.
            context_BJD: context.
            mask_BN: True at valid source positions; None without padding.
            context_mask_BJ: True at valid context entries; None without padding.

        Raises:
            ValueError: wrong shape or dtype of a mask, or context with another width or batch than the source.
        """
        require_context(x_BND, context_BJD)
        q_BNHK = self.q(without_padding(x_BND, mask_BN)).unflatten(-1, (self.heads, -1))
        kv_BJTHK = self.kv(without_padding(context_BJD, context_mask_BJ, name="context_mask_BJ")).unflatten(
            -1, (2, self.heads, -1)
        )
        k_BJHK, v_BJHK = kv_BJTHK.unbind(2)
        q_BNHK, k_BJHK = prepare(q_BNHK, self.q_norm, self.rope, 1), prepare(k_BJHK, self.k_norm, self.rope, 1)
        q_BHNK, k_BHJK, v_BHJK = (part.transpose(1, 2) for part in (q_BNHK, k_BJHK, v_BJHK))
        # with padding: fill empty rows; torch's SDPA accepts them, other softmaxes give NaN
        visible = None
        if context_mask_BJ is not None:
            visible = (context_mask_BJ | ~context_mask_BJ.any(-1, keepdim=True))[:, None, None]
        dropped = self.dropout if self.training else 0.0
        y_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHJK, v_BHJK, attn_mask=visible, dropout_p=dropped)
        y_BND = self.out(y_BHNK.transpose(1, 2).flatten(2))
        if context_mask_BJ is None:
            return y_BND if context_BJD.shape[1] else torch.zeros_like(y_BND)
        return torch.where(context_mask_BJ.any(-1)[:, None, None], y_BND, 0.0)


EXPORT = CrossAttention
