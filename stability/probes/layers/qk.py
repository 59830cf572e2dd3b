"""Compute σ(W_qᵀW_k) of softmax-attention layers, whose growing condition the paper names as the source of attention's
instability (Qi et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.mechanisms import AbstractSoftmaxAttention


def qk_singular_values(layer: AbstractSoftmaxAttention) -> Tensor:
    """Return the singular values of each head's W_qᵀW_k (D × D) that its rank allows, (H, K), largest first, float64 on
    the CPU.

    W_q and W_k are the head's K × D `projections`, so that a logit is xᵀ W_qᵀW_k x′ (biases, RoPE and its factor, 1/√K
    or learned, aside). With thin QR W_qᵀ = Q₁R₁, W_kᵀ = Q₂R₂ the product is Q₁ R₁R₂ᵀ Q₂ᵀ and its nonzero singular
    values are those of the K × K matrix R₁R₂ᵀ: no D × D matrix is made.
    """
    q_HKK, k_HKK = (
        torch.linalg.qr(weight_HKD.detach().double().cpu().mT, mode="r").R for weight_HKD in layer.projections()
    )
    return torch.linalg.svdvals(q_HKK @ k_HKK.mT)
