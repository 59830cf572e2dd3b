"""Measure softmax-attention layers: logits, entropy, σ(W_qᵀW_k) and consensus discrepancy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stability.mechanisms import AbstractSoftmaxAttention
from stability.models.passes import in_float32

CELLS = 1 << 20  # logits in memory at once, unless one sequence has more
Seen = tuple[Tensor, Tensor | None]  # output of a layer's ``qkv``, and its mask


@dataclass(frozen=True)
class AttentionStatistics:
    """One layer's statistics over a batch.

    ``logit_max`` is the largest visible q̃·k̃/√K. ``entropy`` is the mean −Σ p log p in nats, over valid queries with
    at least one visible key. ``lowest_head_entropy`` is the entropy of the sharpest head.
    """

    logit_max: float
    entropy: float
    lowest_head_entropy: float


def attention_statistics(model: nn.Module, forward: Callable[[], Any]) -> dict[str, AttentionStatistics]:
    """Return the statistics of every softmax-attention layer by module name, during ``forward()``.

    Unbounded attention logits precede divergence (Wortsman et al. 2024, arXiv:2309.14322, 3.1); entropy collapse
    accompanies divergence (Zhai et al. 2023, arXiv:2303.06296). Logits are recomputed from the projection's output in
    float32 or wider, for B·H·N² multiply-adds; H·N² or `CELLS` numbers are in memory at once. Only the last pass counts
    for layers evaluated more than once (`model.loops`, residual connections with several evaluations). {} without
    softmax attention.
    """
    found: dict[str, AttentionStatistics] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AbstractSoftmaxAttention)}
    with torch.no_grad(), _watch(layers, found, _statistics):
        forward()
    return found


def attention_logits(model: nn.Module, forward: Callable[[], Any]) -> dict[str, Tensor]:
    """Return every softmax-attention layer's logits of visible pairs by module name, during ``forward()``.

    They are flat, and assume no padding. Only the last pass counts for layers evaluated more than once.
    """
    seen: dict[str, Seen] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AbstractSoftmaxAttention)}
    with torch.no_grad(), _watch(layers, seen):
        forward()
    found = {}
    for name, (qkv_BND, _) in seen.items():
        q_BHNK, k_BHNK, _ = layers[name].split(qkv_BND)
        logits_BHNN = layers[name].logits(q_BHNK, k_BHNK)
        found[name] = logits_BHNN[layers[name].visible(qkv_BND.shape[1], qkv_BND.device).expand_as(logits_BHNN)]
    return found


@contextmanager
def _watch(
    layers: dict[str, AbstractSoftmaxAttention],
    seen: dict[str, Any],
    describe: Callable[[AbstractSoftmaxAttention, Tensor, Tensor | None], Any] = lambda layer, *seen: seen,
) -> Iterator[None]:
    """Record each layer's projection output and mask, or their description, in ``seen`` while open."""
    masks: dict[str, Tensor | None] = {}
    handles = []
    for name, layer in layers.items():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            masks[name] = kwargs.get("mask_BN")

        def record(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            with in_float32(output.device):  # a hook computes as the pass around it does
                seen[name] = describe(layers[name], output.detach(), masks.get(name))

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.qkv.register_forward_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _statistics(layer: AbstractSoftmaxAttention, qkv_BND: Tensor, mask_BN: Tensor | None) -> AttentionStatistics:
    """Compute one layer's statistics from its projection's output, (B, N, …), a few sequences at a time."""
    q_BHNK, k_BHNK, _ = layer.split(qkv_BND if qkv_BND.dtype == torch.float64 else qkv_BND.float())
    largest, entropies_H, rows_H = -math.inf, [0.0] * layer.heads, [0] * layer.heads
    visible = layer.visible(qkv_BND.shape[1], qkv_BND.device)
    # (heads, visible pairs): all heads together, or each by itself
    kinds = [(range(layer.heads), visible)] if visible.ndim == 2 else [([h], each) for h, each in enumerate(visible)]
    parts = max(1, CELLS // (layer.heads * visible.shape[-1] ** 2))
    masks = itertools.repeat(None) if mask_BN is None else mask_BN.split(parts)
    for q_CHNK, k_CHNK, valid_CN in zip(q_BHNK.split(parts), k_BHNK.split(parts), masks, strict=False):
        for heads, in_band_NN in kinds:
            q_CGNK, k_CGNK = (part[:, heads[0] : heads[-1] + 1] for part in (q_CHNK, k_CHNK))
            found = _describe_rows(layer.logits(q_CGNK, k_CGNK), in_band_NN, valid_CN)
            largest = max(largest, found[0])
            for head, total in zip(heads, found[1], strict=True):
                entropies_H[head] += total
                rows_H[head] += found[2]
    by_head = [total / number for total, number in zip(entropies_H, rows_H, strict=True) if number]
    if not by_head:
        return AttentionStatistics(math.nan, math.nan, math.nan)
    return AttentionStatistics(largest, math.fsum(by_head) / len(by_head), min(by_head))


def _describe_rows(logits_CHNN: Tensor, visible_NN: Tensor, valid_CN: Tensor | None) -> tuple[float, list[float], int]:
    """Return the largest visible logit, each head's sum of entropies, and the number of queries that see a key.

    Args:
        logits_CHNN: logits of all pairs.
        visible_NN: True for a visible pair.
        valid_CN: True for a valid position; padded ones neither see nor are seen. None: all are valid.
    """
    visible_CNN = visible_NN[None] if valid_CN is None else visible_NN & valid_CN[:, None] & valid_CN[:, :, None]
    sees_CN = visible_CNN.any(-1)
    counted = int(sees_CN.sum()) * len(logits_CHNN) // len(sees_CN)
    if not counted:
        return -math.inf, [0.0] * logits_CHNN.shape[1], 0
    if not visible_CNN.all():  # a finite number, so that p log p is 0
        logits_CHNN = logits_CHNN.masked_fill(~visible_CNN[:, None], torch.finfo(logits_CHNN.dtype).min / 2)
    log_p_CHNN = logits_CHNN.log_softmax(-1)
    entropy_CHN = -(log_p_CHNN.exp() * log_p_CHNN).sum(-1).masked_fill(~sees_CN[:, None], 0.0)
    return float(logits_CHNN.max()), entropy_CHN.double().sum((0, 2)).tolist(), counted


def qk_singular_values(layer: AbstractSoftmaxAttention) -> Tensor:
    """Return the K largest singular values of each head's W_qᵀW_k, (H, K).

    Descending, float64 on the CPU; the other D − K are zero. A growing condition number is a source of attention's
    instability (Qi et al. 2025). W_q and W_k are the head's K × D `projections`; a logit is xᵀ W_qᵀW_k x′, apart from
    biases, RoPE and the scale (1/√K or learned).
    """
    # W_qᵀ = Q₁R₁ and W_kᵀ = Q₂R₂ (thin QR): the nonzero singular values are those of R₁R₂ᵀ, without a D × D matrix
    q_HKK, k_HKK = (
        torch.linalg.qr(weight_HKD.detach().double().cpu().mT, mode="r").R for weight_HKD in layer.projections()
    )
    return torch.linalg.svdvals(q_HKK @ k_HKK.mT)


def discrepancies(layer: AbstractSoftmaxAttention, x_BND: Tensor) -> Iterator[dict[str, Any]]:
    """Yield each head's consensus discrepancy (AttentionX, Eq. 10) on one sequence.

    Columns, root mean squares over positions and the head's width in float64: ``value_rms`` of V, ``own_rms`` of Φ = V
    − γAV, ``unscaled_rms`` of V − AV. A is the layer's own softmax: causal, windowed, or without its diagonal
    (``diagonal`` 0; a row without visible keys is zero, so Φ = V). γ is the layer's own, or 1 if absent (`sa`, `sw`):
    both numbers are then equal. In a causal layer a first position with only itself visible contributes V − AV = 0.

    Args:
        layer: the attention layer.
        x_BND: its input (1, N, D), without padding.
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
