"""How much of a low-pass filter softmax attention is: its matrices A on what differs between positions, to be put beside consensus's 1 − 2ηλ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stability.models.position import rope
from stability.probes.layers.attention import in_band


def is_attention(mixer: nn.Module) -> bool:
    """Whether a layer is softmax attention, as `sa`, `sw` and `attentionx` are."""
    return isinstance(getattr(mixer, "qkv", None), nn.Linear) and hasattr(mixer, "heads")


@dataclass(frozen=True)
class HeadFilter:
    """One head on one sequence: numbers by column, and the N − 1 singular values of A on the signals without a mean, largest first."""

    numbers: dict[str, Any]
    singular_values: np.ndarray


def low_pass(layer: Any, x_BND: Tensor) -> Iterator[HeadFilter]:
    """Each head of an attention layer on one sequence x (1, N, D): A = softmax(q̃k̃ᵀ/√K), its values v before, and after what the layer makes of them: Av,
    or v − γAv where it is `attentionx`.

    With P = I − 11ᵀ/N, ``gain`` is the largest singular value of PAP, the most by which A amplifies anything that differs between positions;
    ``second_eigenvalue`` the largest modulus among its eigenvalues, which are A's own without the 1 of A1 = 1; ``variance_*`` are ‖P·‖² before and after.
    Where attention is nearly hard, A is far from normal and its small eigenvalues are as uncertain as a root of rounding; the gain is not.
    """
    with torch.no_grad():
        qkv_NTHK = layer.qkv(x_BND)[0].unflatten(-1, (3, layer.heads, -1)).double()
        a_HNN, v_HNK = softmax_matrices(layer, qkv_NTHK), qkv_NTHK[:, 2].transpose(0, 1)
    for a_NN, v_NK in zip(a_HNN, v_HNK, strict=True):
        restricted_NN = _centred(_centred(a_NN).mT).mT
        values = torch.linalg.svdvals(restricted_NN).cpu().numpy()[:-1]
        before, after = (_centred(part).square().sum() for part in (v_NK, updated_values(layer, a_NN, v_NK)))
        numbers = {
            "num_positions": len(a_NN),
            "head_width": v_NK.shape[-1],
            "gain": float(values[0]),
            "second_eigenvalue": _second_eigenvalue(a_NN.cpu().numpy()),
            "variance_before": float(before),
            "variance_after": float(after),
        }
        yield HeadFilter(numbers, values)


def updated_values(layer: Any, a_NN: Tensor, v_NK: Tensor) -> Tensor:
    """What a head makes of its values before W_o: Av, or the discrepancy v − γAv of `attentionx`."""
    attended_NK = a_NN @ v_NK
    return v_NK - layer.gamma * attended_NK if hasattr(layer, "gamma") else attended_NK


def softmax_matrices(layer: Any, qkv_NTHK: Tensor) -> Tensor:
    """A of each head, (H, N, N), from the projection's output on one sequence without padding; a row that sees nothing is zero."""
    q_HNK, k_HNK = (part.transpose(0, 1) for part in rope(qkv_NTHK[:, :2], position_dim=0).unbind(1))
    visible_NN = in_band(layer, len(qkv_NTHK), qkv_NTHK.device)
    return (q_HNK @ k_HNK.mT / math.sqrt(q_HNK.shape[-1])).masked_fill(~visible_NN, -math.inf).softmax(-1).masked_fill(~visible_NN, 0.0)


def _second_eigenvalue(a_NN: np.ndarray) -> float:
    """NaN where LAPACK's iteration does not settle. From A itself: its entries are exact to their own size, those of PAP only to that of the largest."""
    try:
        return float(np.sort(np.abs(np.linalg.eigvals(a_NN)))[-2])
    except np.linalg.LinAlgError:
        return math.nan


def _centred(x_NK: Tensor) -> Tensor:
    """P x: every column without its mean."""
    return x_NK - x_NK.mean(0)
