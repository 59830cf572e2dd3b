"""Muon (Jordan et al. 2024): matrices step along their orthogonalised momentum, all else by AdamW."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, own_settings
from stability.optimizers._orthogonal import Orthogonalised, OrthogonalSettings, quintic

# of the quintic of https://kellerjordan.github.io/posts/muon: steep at 0, so that five iterations bring every singular
# value into [0.7, 1.2] or so, where it does not converge
QUINTIC = (3.4445, -4.7750, 2.0315)
SMALLEST = 1e-7  # norm that a matrix is divided by at least


class Muon(AbstractMatrixOptimizer):
    """Momentum whose singular values are made 1 by a Newton–Schulz iteration (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon; ``torch.optim.Muon`` but for its bfloat16). Fused queries, keys and
    values are a matrix each."""

    lr_reference = 0.02

    class Config(OrthogonalSettings):
        iterations: int = Field(default=5, ge=1, le=100, description="iterations of the quintic")

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return Orthogonalised(
            groups, lambda matrix, group: newton_schulz(matrix, group["iterations"]), own_settings(config)
        )


def newton_schulz(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return about UVᵀ of a matrix USVᵀ, (m, n): the quintic's iterations, begun with the matrix over its Frobenius
    norm."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    near = quintic(wide / wide.norm().clamp(min=SMALLEST), [QUINTIC] * iterations)
    return near.mT if is_tall else near


EXPORT = Muon
