"""Measure the mixing matrices' deviation from double stochasticity, token by token.

For models with residual streams (mHC-lite, arXiv:2601.05732, 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stability.models.backbone import Backbone
from stability.objectives import Examples
from stability.residuals import AbstractResidual, AbstractSinkhornStreams, AbstractStreams

OUTLIER_LOG_RANGE = 30.0  # ν ≤ 1e-13, the paper's outliers (4.3; the authors' script)
QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
Values = dict[tuple[str, str], np.ndarray]  # (matrix, quantity) → values of all tokens


class Connection(NamedTuple):
    """One residual connection."""

    branch: str
    module: AbstractStreams


def connections(model: Backbone) -> list[Connection]:
    """Return the model's stream-mixing connections; [] for a plain residual."""
    return [Connection(branch, module) for branch, module in residuals(model) if isinstance(module, AbstractStreams)]


def residuals(model: Backbone) -> list[tuple[str, AbstractResidual]]:
    """Return every residual connection with its branch name, in order of execution.

    Connections of blocks passed several times (`model.loops`) are repeated.
    """
    found: list[Any] = []
    for block in model.list_passes():
        cross = [] if block.cross is None else [("cross", block.cross.residual)]
        found += [("mixer", block.mixer_residual), *cross, ("ffn", block.ffn_residual)]
    return found


def stream_statistics(
    model: Backbone, sequences: Iterable[Examples], outlier_log_range: float = OUTLIER_LOG_RANGE
) -> Iterator[list[dict[str, Any]]]:
    """Yield [] after each sequence, and all rows at the end.

    The rows have the columns `connection … num_values` of `schema.PROBE_COLUMNS["streams"]`. Quantities per token, with
    A_l the matrix of connection l (X' = A_lᵀX + …), P_l = A_1 ⋯ A_l and R_l = A_l ⋯ A_L:

    - ``single`` A_l: ``log_range`` ln(1/ν), as plotted in the paper; ν is the relative range, smallest over largest
    entry of Sinkhorn and Knopp's input (Eq. 3; Chakrabarty & Khanna 2021). ``beyond``: share of tokens with ln(1/ν)
    above ``outlier_log_range``; ``threshold``: this number; ``iterations``: the connection's number; ``column_sum``,
    ``row_sum``, ``spectral_norm``;
    - ``product`` P_l: the same three, and ``forward_gain`` max_t Σ_s |P_st|, mixing's largest amplification of a
    signal's largest entry from the embedding through connection l;
    - ``rest`` R_l: ``backward_gain`` max_s Σ_t |R_st|, the same for a gradient from the head back through connection l.

    The gains are the "Amax gain magnitude" of Xie et al. (2025, 5.4). Quantiles are over tokens (sums: also over
    streams), for each connection and, as connection None, for all ``single`` matrices. Measured in the model's dtype:
    `stability.probe` uses float64, exact to 1e-15 for a sum of 1. Narrower dtypes round the coefficients: in bfloat16,
    mHC-lite's first matrix has columns with sum 0.9982 (tests/residuals/test_streams.py).

    Args:
        model: the model.
        sequences: its inputs, in batches.
        outlier_log_range: threshold for ``beyond``.
    """
    chain, seen = connections(model), []
    for example in sequences:
        seen.append(_measure(chain, model, example, outlier_log_range))
        yield []
    rows, pooled = list(_iterations(chain, outlier_log_range)), {}
    for number, connection in enumerate(chain):
        values = {key: np.concatenate([each[number][key] for each in seen]) for key in seen[0][number]}
        rows += [row for key, found in values.items() for row in _rows(number, connection.branch, key, found)]
        for key, found in values.items():
            pooled.setdefault(key, []).append(found)
    yield rows + [
        row
        for key, found in pooled.items()
        if key[0] == "single"
        for row in _rows(None, "all", key, np.concatenate(found))
    ]


@torch.no_grad()
def _measure(chain: list[Connection], model: Backbone, example: Examples, outlier: float) -> list[Values]:
    """Return each connection's values on one batch."""
    states = _states(chain, model, example)
    mixes = [each.module.coefficients(state).mix_BNST.flatten(0, 1) for each, state in zip(chain, states, strict=True)]
    products, rests = [mixes[0]], [mixes[-1]]
    for mix_PST in mixes[1:]:
        products.append(products[-1] @ mix_PST)
    for mix_PST in mixes[-2::-1]:
        rests.insert(0, mix_PST @ rests[0])
    found = []
    for each, state, mix_PST, product_PST, rest_PST in zip(chain, states, mixes, products, rests, strict=True):
        values = _sums("single", mix_PST) | _ranges(each.module, state, outlier) | _sums("product", product_PST)
        values["product", "forward_gain"] = product_PST.abs().sum(-2).amax(-1)
        values["rest", "backward_gain"] = rest_PST.abs().sum(-1).amax(-1)
        found.append({key: tensor.flatten().cpu().numpy() for key, tensor in values.items()})
    return found


def _states(chain: list[Connection], model: Backbone, example: Examples) -> list[Tensor]:
    """Return each connection's input (B, N, S, D) from one forward pass."""
    states: list[Tensor] = []
    modules = dict.fromkeys(each.module for each in chain)
    handles = [module.register_forward_pre_hook(lambda _, args: states.append(args[0])) for module in modules]
    try:
        example.logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return states


def _sums(matrix: str, m_PST: Tensor) -> dict[tuple[str, str], Tensor]:
    return {
        (matrix, "column_sum"): m_PST.sum(-2),
        (matrix, "row_sum"): m_PST.sum(-1),
        (matrix, "spectral_norm"): torch.linalg.matrix_norm(m_PST, 2),
    }


def _ranges(module: AbstractStreams, state: Tensor, outlier: float) -> dict[tuple[str, str], Tensor]:
    """Return the range of the logits before Sinkhorn's iterations; {} for other connections."""
    if not isinstance(module, AbstractSinkhornStreams):
        return {}
    logits = module.mixing_logits(state).flatten(-2)
    log_range = logits.amax(-1) - logits.amin(-1)
    return {("single", "log_range"): log_range, ("single", "beyond"): (log_range > outlier).to(log_range.dtype)}


def _iterations(chain: list[Connection], outlier: float) -> Iterator[dict[str, Any]]:
    """Yield rows with each Sinkhorn connection's number of iterations and outlier threshold."""
    for number, each in enumerate(chain):
        if isinstance(each.module, AbstractSinkhornStreams):
            where = {"connection": number, "branch": each.branch, "matrix": "single", "quantile": None, "num_values": 1}
            yield where | {"quantity": "iterations", "value": float(each.module.config.iterations)}
            yield where | {"quantity": "threshold", "value": float(outlier)}


def _rows(number: int | None, branch: str, key: tuple[str, str], values: np.ndarray) -> Iterator[dict[str, Any]]:
    matrix, quantity = key
    where = {"connection": number, "branch": branch, "matrix": matrix, "quantity": quantity, "num_values": len(values)}
    if quantity == "beyond":
        yield where | {"quantile": None, "value": float(values.mean())}
        return
    for quantile, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True):
        yield where | {"quantile": quantile, "value": float(value)}
