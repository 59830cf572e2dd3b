"""Compare the paper's graphs' algebraic connectivity with section 4 (Eqs. 15, 16 and 35)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from stability.probes.layers.laplacian import connectivity

POSITIONS = (32, 64, 128, 256, 512, 1024)
WINDOWS = (1, 2, 4, 8, 16, 32)
MOST_COMPLETE = 256  # nodes of the largest complete graph: its matrix is full


def window_path(num_nodes: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges i < j ≤ i + w of P_N^w (Definition 3.1)."""
    near = np.arange(1, min(window, num_nodes - 1) + 1)
    low = np.concatenate([np.arange(num_nodes - offset) for offset in near])
    return low, np.concatenate([np.arange(offset, num_nodes) for offset in near])


def cycle(num_nodes: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of C_N^w, w < N/2 (Remark 4.1).

    The edges are {i, i + o mod N}, 0 < o ≤ w. ``ValueError`` for a larger w.
    """
    if 2 * window >= num_nodes:
        raise ValueError(f"a cycle of {num_nodes} nodes takes a window below {num_nodes / 2:g}, got {window}")
    nodes = np.tile(np.arange(num_nodes), window)
    return nodes, (nodes + np.repeat(np.arange(1, window + 1), num_nodes)) % num_nodes


def complete(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all edges of K_N."""
    return np.triu_indices(num_nodes, 1)


def cycle_connectivity(num_nodes: int, window: int) -> float:
    """Return λ_1(C_N^w) = 4 Σ_{j ≤ w} sin²(πj/N) (Eq. 15)."""
    return 4 * sum(math.sin(math.pi * j / num_nodes) ** 2 for j in range(1, window + 1))


def path_bounds(num_nodes: int, window: int) -> tuple[float, float]:
    """Return the bounds ½λ_1(C_2N^w) ≤ λ_1(P_N^w) ≤ λ_1(C_2N^w) for w < N/2 (Eqs. 16 and 35)."""
    upper = cycle_connectivity(2 * num_nodes, window)
    return upper / 2, upper


def connectivity_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each graph: kind, N, w, computed λ_1, and its bounds.

    For cycle and complete graphs both bounds equal the closed form.
    """
    for num_nodes in POSITIONS:
        for window in (window for window in WINDOWS if 2 * window < num_nodes):
            low, high = path_bounds(num_nodes, window)
            closed = cycle_connectivity(num_nodes, window)
            yield _row("window", num_nodes, window, connectivity(*window_path(num_nodes, window), num_nodes), low, high)
            yield _row("cycle", num_nodes, window, connectivity(*cycle(num_nodes, window), num_nodes), closed, closed)
        if num_nodes <= MOST_COMPLETE:
            yield _row(
                "complete",
                num_nodes,
                num_nodes - 1,
                connectivity(*complete(num_nodes), num_nodes),
                num_nodes,
                num_nodes,
            )


def _row(graph: str, num_nodes: int, window: int, value: float, low: float, high: float) -> dict[str, Any]:
    return {
        "graph": graph,
        "positions": num_nodes,
        "window": window,
        "connectivity": value,
        "bound_low": low,
        "bound_high": high,
    }
