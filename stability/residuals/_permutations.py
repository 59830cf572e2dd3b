"""List permutation matrices, whose convex combinations are the doubly stochastic matrices (Birkhoff 1946, von Neumann
1953)."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor


def permutations(num: int, count: int | None, seed: int) -> list[tuple[int, ...]]:
    """Return the identity, then the other permutations of ``num`` in lexicographic order (``count`` None), or ``count``
    − 1 of them, drawn by ``seed``."""
    if count is None:
        return list(itertools.permutations(range(num)))
    chosen, draw = {tuple(range(num)): None}, random.Random(seed)
    while len(chosen) < count:
        chosen[tuple(draw.sample(range(num), num))] = None
    return list(chosen)


def permutation_matrices(num: int, count: int | None, seed: int) -> Tensor:
    """Return (R, S·T), float32: row r is a permutation matrix P_r, flattened; P_0 = I."""
    return torch.eye(num)[torch.tensor(permutations(num, count, seed))].flatten(1)
