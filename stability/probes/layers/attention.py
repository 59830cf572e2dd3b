"""Measure how sharp attention has become: the largest logit and the entropy of each softmax-attention layer, from one
forward pass."""

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
