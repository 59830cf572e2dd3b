"""Measure attention as a low-pass filter: the action of its weights A on position differences.

For comparison with consensus' 1 − 2ηλ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability.mechanisms import AbstractAttention


@dataclass(frozen=True)
class HeadFilter:
    """One head on one sequence: numbers by column, and N − 1 singular values of A.

    The singular values are those on zero-mean signals, in descending order.
    """

    numbers: dict[str, Any]
    singular_values: np.ndarray


def low_pass(layer: AbstractAttention, x_BND: Tensor) -> Iterator[HeadFilter]:
    """Yield each head's filter of an attention layer on one sequence.

    With P = I − 11ᵀ/N, ``gain`` is the largest singular value of PAP: the largest amplification of any difference
    between positions. ``second_eigenvalue`` is the largest modulus of PAP's eigenvalues: A's own without the 1 of A1 =
    1 (NaN if A's rows do not sum to 1). ``variance_*`` are ‖P·‖² of the values v, and of the layer's mixture: Av, or v
    − γAv for `attentionx`. For nearly hard attention A is far from normal, and its small eigenvalues are as uncertain
    as a root of rounding; the gain is accurate.

    Args:
        layer: the attention layer.
        x_BND: its input (1, N, D), without padding.
    """
    with torch.no_grad():
        a_BHNN, v_BHNK = layer.weights(x_BND).double(), layer.values(x_BND).double()
        mixed_BHNK = layer.mixed(a_BHNN, v_BHNK)  # all heads at once: a layer may have one coefficient per head
    for a_NN, v_NK, mixed_NK in zip(a_BHNN[0], v_BHNK[0], mixed_BHNK[0], strict=True):
        restricted_NN = _centre(_centre(a_NN).mT).mT
        values = torch.linalg.svdvals(restricted_NN).cpu().numpy()[:-1]
        before, after = (_centre(part).square().sum() for part in (v_NK, mixed_NK))
        numbers = {
            "num_positions": len(a_NN),
            "head_width": v_NK.shape[-1],
            "gain": float(values[0]),
            "second_eigenvalue": _second_eigenvalue(a_NN.cpu().numpy()) if layer.rows_sum_to_one else math.nan,
            "variance_before": float(before),
            "variance_after": float(after),
        }
        yield HeadFilter(numbers, values)


def _second_eigenvalue(a_NN: np.ndarray) -> float:
    """Return the modulus of A's second eigenvalue; NaN if LAPACK does not converge."""
    try:
        # from A itself: its entries are exact relative to their own size, PAP's only relative to the largest
        return float(np.sort(np.abs(np.linalg.eigvals(a_NN)))[-2])
    except np.linalg.LinAlgError:
        return math.nan


def _centre(x_NK: Tensor) -> Tensor:
    """Return P x: every column minus its mean."""
    return x_NK - x_NK.mean(0)
