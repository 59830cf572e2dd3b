"""Measure attention's consensus discrepancy (AttentionX, Eq. 10): how far values lie from what their position attends
to, per head and held-out sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stability.mechanisms import AbstractSoftmaxAttention


def discrepancies(layer: AbstractSoftmaxAttention, x_BND: Tensor) -> Iterator[dict[str, Any]]:
    """Yield for each head of an attention layer on one sequence x (1, N, D) without padding, float64, root mean squares
    over positions and the head's width of V (``value_rms``), of Φ = V − γAV with the layer's own γ (``own_rms``) and of
    V − AV (``unscaled_rms``).

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
