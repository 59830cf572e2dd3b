"""Measure how much of a low-pass filter attention is: its weights A on what differs between positions, beside 1 −
2ηλ."""

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
    """One head on one sequence: numbers by column, and the N − 1 singular values of A on the signals without a mean,
    largest first."""

    numbers: dict[str, Any]
    singular_values: np.ndarray


def low_pass(layer: AbstractAttention, x_BND: Tensor) -> Iterator[HeadFilter]:
    """Yield each head of an attention layer on one sequence x (1, N, D) without padding: its weights A, its values v
    before, and after what the layer makes of them: Av, or v − γAv where it is `attentionx`.

    With P = I − 11ᵀ/N, ``gain`` is the largest singular value of PAP, the most by which A amplifies anything that
    differs between positions; ``second_eigenvalue`` the largest modulus among its eigenvalues, which are A's own
    without the 1 of A1 = 1 (NaN where A's rows do not sum to 1); ``variance_*`` are ‖P·‖² before and after. Where
    attention is nearly hard, A is far from normal and its small eigenvalues are as uncertain as a root of rounding; the
    gain is not.
    """
    with torch.no_grad():
        a_BHNN, v_BHNK = layer.weights(x_BND).double(), layer.values(x_BND).double()
        mixed_BHNK = layer.mixed(a_BHNN, v_BHNK)  # all heads at once: one may have a number for each of its heads
    for a_NN, v_NK, mixed_NK in zip(a_BHNN[0], v_BHNK[0], mixed_BHNK[0], strict=True):
        restricted_NN = _centred(_centred(a_NN).mT).mT
        values = torch.linalg.svdvals(restricted_NN).cpu().numpy()[:-1]
        before, after = (_centred(part).square().sum() for part in (v_NK, mixed_NK))
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
    """Return the modulus of A's second eigenvalue; NaN where LAPACK's iteration does not settle. From A itself: its
    entries are exact to their own size, those of PAP only to that of the largest."""
    try:
        return float(np.sort(np.abs(np.linalg.eigvals(a_NN)))[-2])
    except np.linalg.LinAlgError:
        return math.nan


def _centred(x_NK: Tensor) -> Tensor:
    """Return P x: every column without its mean."""
    return x_NK - x_NK.mean(0)
