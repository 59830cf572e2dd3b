"""How sharp attention has become: the largest logit and the entropy of each softmax-attention layer (sa, sw, attentionx), from one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stability.models.position import rope


@dataclass(frozen=True)
class AttentionStatistics:
    """Of one layer over a batch. ``logit_max``: the largest q̃·k̃/√K that is visible. ``entropy``: mean of −Σ p log p in nats, over the rows of valid queries
    that see a key. ``lowest_head_entropy``: the same for the head that attends most sharply."""

    logit_max: float
    entropy: float
    lowest_head_entropy: float


def attention_statistics(model: nn.Module, forward: Callable[[], Any]) -> dict[str, AttentionStatistics]:
    """The statistics of every layer of ``model`` that holds ``qkv`` and ``heads``, by module name, over what ``forward()`` computes with it.

    Attention logits that grow without bound precede divergence (Wortsman et al. 2024, arXiv:2309.14322, 3.1); entropy that collapses goes with it (Zhai et
    al. 2023, arXiv:2303.06296). The logits are computed again from the projection's output, in float32 or wider, one sequence at a time: B·H·N²
    multiply-adds, and H·N² numbers at a time. Layers that ran more than once count their last pass. {} where no layer is softmax attention.
    """
    seen: dict[str, tuple[Tensor, Tensor | None]] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "qkv", None), nn.Linear) and hasattr(module, "heads")}
    with torch.no_grad(), _watched(layers, seen):
        forward()
    return {name: _statistics(layers[name], *kept) for name, kept in seen.items()}


@contextmanager
def _watched(layers: dict[str, nn.Module], seen: dict[str, tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """While open, each layer's projection output and mask are kept in ``seen``."""
    masks: dict[str, Tensor | None] = {}
    handles = []
    for name, layer in layers.items():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            masks[name] = kwargs.get("mask_BN")

        def projected(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            seen[name] = (output.detach(), masks.get(name))

        handles += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.get_submodule("qkv").register_forward_hook(projected)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _statistics(layer: Any, qkv_BND: Tensor, mask_BN: Tensor | None) -> AttentionStatistics:
    qk_BNTHK = qkv_BND.unflatten(-1, (3, layer.heads, -1))[:, :, :2]
    qk_BNTHK = rope(qk_BNTHK if qk_BNTHK.dtype == torch.float64 else qk_BNTHK.float(), position_dim=1)
    largest, entropies, rows = -math.inf, torch.zeros(layer.heads, dtype=torch.float64), 0
    in_band_NN = in_band(layer, qkv_BND.shape[1], qkv_BND.device)
    for number, qk_NTHK in enumerate(qk_BNTHK):
        q_HNK, k_HNK = (part.transpose(0, 1) for part in qk_NTHK.unbind(1))
        valid_N = torch.ones(qkv_BND.shape[1], dtype=torch.bool, device=qkv_BND.device) if mask_BN is None else mask_BN[number]
        visible_NN = in_band_NN & valid_N
        logits_HMN = (q_HNK @ k_HNK.transpose(1, 2) / math.sqrt(q_HNK.shape[-1])).masked_fill(~visible_NN, -math.inf)[:, valid_N & visible_NN.any(-1)]
        if logits_HMN.numel():
            largest = max(largest, float(logits_HMN.max()))
            entropies += torch.special.entr(logits_HMN.softmax(-1)).sum((-1, -2)).double().cpu()
            rows += logits_HMN.shape[1]
    by_head = entropies / rows if rows else entropies * math.nan
    return AttentionStatistics(largest if rows else math.nan, float(by_head.mean()), float(by_head.min()))


def in_band(layer: Any, num_positions: int, device: torch.device) -> Tensor:
    """True where query i (first axis) may see key j: everywhere, j ≤ i for causal `sa`, i − before ≤ j ≤ i + after for `sw`, j ≠ i for `attentionx` with a
    masked diagonal (whose first causal row then sees nothing)."""
    offset = torch.arange(num_positions, device=device) - torch.arange(num_positions, device=device)[:, None]
    if hasattr(layer, "before"):
        return (offset >= -layer.before) & (offset <= layer.after)
    in_direction = offset <= 0 if layer.causal else torch.ones_like(offset, dtype=torch.bool)
    return in_direction & (offset != 0) if getattr(layer, "mask_diagonal", False) else in_direction
