"""Muon (Jordan et al. 2024): orthogonalised momentum for matrices, AdamW for all else."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import Groups, own_settings
from stability.optimizers._orthogonal import AbstractOrthogonalOptimizer, Orthogonalised, OrthogonalSettings, quintic

# Coefficients from https://kellerjordan.github.io/posts/muon. The quintic is steep at 0, so five iterations move every
# singular value into about [0.7, 1.2]; inside this interval it does not converge.
QUINTIC = (3.4445, -4.7750, 2.0315)
SMALLEST = 1e-7  # lower bound of the norm in the division


class Muon(AbstractOrthogonalOptimizer):
    """Momentum with all singular values set to 1 by a Newton–Schulz iteration.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; as ``torch.optim.Muon`` without bfloat16. Fused
    queries, keys and values are one matrix each.
    """

    lr_reference = 0.02

    class Config(OrthogonalSettings):
        iterations: int = Field(default=5, ge=1, le=100, description="iterations of the quintic")

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return Orthogonalised(
            groups, lambda matrix, group: newton_schulz(matrix, group["iterations"]), own_settings(config)
        )


def newton_schulz(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return approximately UVᵀ for a matrix USVᵀ, (m, n).

    The quintic iteration starts from the matrix over its Frobenius norm.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    near = quintic(wide / wide.norm().clamp(min=SMALLEST), [QUINTIC] * iterations)
    return near.mT if is_tall else near


EXPORT = Muon
