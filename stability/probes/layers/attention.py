"""Measure softmax-attention layers: the largest logit and the entropy of each from one forward pass, σ(W_qᵀW_k), and
how far values lie from what their position attends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stability.mechanisms import AbstractSoftmaxAttention

Seen = tuple[Tensor, Tensor | None]  # what a layer's ``qkv`` gave, and its mask


@dataclass(frozen=True)
class AttentionStatistics:
    """The statistics of one layer over a batch. ``logit_max``: the largest q̃·k̃/√K that is visible. ``entropy``: mean
    of −Σ p log p in nats, over the rows of valid queries that see a key. ``lowest_head_entropy``: the same for the head
    that attends most sharply."""

    logit_max: float
    entropy: float
    lowest_head_entropy: float


def attention_statistics(model: nn.Module, forward: Callable[[], Any]) -> dict[str, AttentionStatistics]:
    """Return the statistics of every softmax-attention layer of ``model``, by module name, over what ``forward()``
    computes.

    Attention logits that grow without bound precede divergence (Wortsman et al. 2024, arXiv:2309.14322, 3.1); entropy
    that collapses goes with it (Zhai et al. 2023, arXiv:2303.06296). The logits are computed again from the
    projection's output, in float32 or wider, one sequence at a time: B·H·N² multiply-adds, and H·N² numbers at a time.
    Layers that ran more than once (`model.loops`, residual connections that evaluate a branch several times) count
    their last pass. {} where no layer is softmax attention.
    """
    seen: dict[str, Seen] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AbstractSoftmaxAttention)}
    with torch.no_grad(), _watched(layers, seen):
        forward()
    return {name: _statistics(layers[name], *kept) for name, kept in seen.items()}


@contextmanager
def _watched(layers: dict[str, AbstractSoftmaxAttention], seen: dict[str, Seen]) -> Iterator[None]:
    """Keep each layer's projection output and mask in ``seen`` while open."""
    masks: dict[str, Tensor | None] = {}
    handles = []
    for name, layer in layers.items():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            masks[name] = kwargs.get("mask_BN")

        def projected(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            seen[name] = (output.detach(), masks.get(name))

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.qkv.register_forward_hook(projected))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _statistics(layer: AbstractSoftmaxAttention, qkv_BND: Tensor, mask_BN: Tensor | None) -> AttentionStatistics:
    """Compute one layer's statistics from its projection's output, (B, N, …), one sequence after another."""
    q_BHNK, k_BHNK, _ = layer.split(qkv_BND if qkv_BND.dtype == torch.float64 else qkv_BND.float())
    largest, entropies, rows = -math.inf, *torch.zeros(2, layer.heads, dtype=torch.float64)
    visible = layer.visible(qkv_BND.shape[1], qkv_BND.device)
    # heads that see the same pairs, and these: all of them together, or each by itself
    kinds = (
        [(slice(None), visible)] if visible.ndim == 2 else [(slice(h, h + 1), visible[h]) for h in range(layer.heads)]
    )
    for number, (q_HNK, k_HNK) in enumerate(zip(q_BHNK, k_BHNK, strict=True)):
        valid_N = (
            torch.ones(qkv_BND.shape[1], dtype=torch.bool, device=qkv_BND.device)
            if mask_BN is None
            else mask_BN[number]
        )
        for heads, in_band_NN in kinds:
            visible_NN = in_band_NN & valid_N
            logits_HNN = layer.logits(q_HNK[heads], k_HNK[heads]).masked_fill(~visible_NN, -math.inf)
            logits_HMN = logits_HNN[:, valid_N & visible_NN.any(-1)]
            if logits_HMN.numel():
                largest = max(largest, float(logits_HMN.max()))
                entropies[heads] += torch.special.entr(logits_HMN.softmax(-1)).sum((-1, -2)).double().cpu()
                rows[heads] += logits_HMN.shape[1]
    if not rows.any():
        return AttentionStatistics(math.nan, math.nan, math.nan)
    by_head = (entropies / rows)[rows > 0]
    return AttentionStatistics(largest, float(by_head.mean()), float(by_head.min()))


def qk_singular_values(layer: AbstractSoftmaxAttention) -> Tensor:
    """Return the singular values of each head's W_qᵀW_k (D × D) that its rank allows, (H, K), largest first, float64 on
    the CPU. Their growing condition is a source of attention's instability (Qi et al. 2025).

    W_q and W_k are the head's K × D `projections`, so that a logit is xᵀ W_qᵀW_k x′ (biases, RoPE and its factor, 1/√K
    or learned, aside). With thin QR W_qᵀ = Q₁R₁, W_kᵀ = Q₂R₂ the product is Q₁ R₁R₂ᵀ Q₂ᵀ and its nonzero singular
    values are those of the K × K matrix R₁R₂ᵀ: no D × D matrix is made.
    """
    q_HKK, k_HKK = (
        torch.linalg.qr(weight_HKD.detach().double().cpu().mT, mode="r").R for weight_HKD in layer.projections()
    )
    return torch.linalg.svdvals(q_HKK @ k_HKK.mT)


def discrepancies(layer: AbstractSoftmaxAttention, x_BND: Tensor) -> Iterator[dict[str, Any]]:
    """Yield for each head of an attention layer on one sequence x (1, N, D) without padding, float64, root mean squares
    over positions and the head's width of V (``value_rms``), of Φ = V − γAV with the layer's own γ (``own_rms``) and of
    V − AV (``unscaled_rms``): its consensus discrepancy (AttentionX, Eq. 10).

    A is the layer's own softmax: causal, windowed, without its diagonal where it is (``diagonal`` 0; a row that then
    sees nothing is zero, so that Φ = V there). γ is the layer's own; one that has none (`sa`, `sw`) is taken at γ = 1,
    by which its two numbers agree. A causal first position that sees itself alone counts with V − AV = 0.
    """
    gamma = 1.0 if layer.gamma is None else float(layer.gamma)
    with torch.no_grad():
        v_HNK = layer.values(x_BND)[0].double()
        attended_HNK = layer.weights(x_BND)[0].double() @ v_HNK
    about = {"num_positions": v_HNK.shape[1], "gamma": gamma, "diagonal": 1 - int(layer.mask_diagonal)}
    for value_NK, attended_NK in zip(v_HNK, attended_HNK, strict=True):
        parts = {
            "value_rms": value_NK,
            "own_rms": value_NK - gamma * attended_NK,
            "unscaled_rms": value_NK - attended_NK,
        }
        yield about | {name: float(part.square().mean().sqrt()) for name, part in parts.items()}
