"""Turbo-Muon (Boissin et al. 2025): Muon with a preconditioned iteration, one step shorter."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.optimizers._divided import Groups, own_settings
from stability.optimizers._orthogonal import AbstractOrthogonalOptimizer, Orthogonalised, OrthogonalSettings, quintic

# coefficients of each iteration, tuned for the singular values after the rescaling
TUNED = (
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
)


class TurboMuon(AbstractOrthogonalOptimizer):
    """Muon with an almost orthogonal rescaling before the Newton–Schulz iteration.

    Four tuned iterations then replace five (Boissin et al. 2025, https://hal.science/hal-05390446).
    """

    lr_reference = 0.02

    class Config(OrthogonalSettings):
        pass

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return Orthogonalised(groups, lambda matrix, _: rescaled_newton_schulz(matrix), own_settings(config))


def rescaled_newton_schulz(matrix: Tensor) -> Tensor:
    """Return approximately UVᵀ for a matrix USVᵀ, (m, n).

    Before the tuned quintics, row i of the wide orientation is divided by (Σ_j |XXᵀ|_ij)^½, so the spectral norm is at
    most 1 (AOL, Prach & Lampert 2022, arXiv:2208.03160, Theorem 1).
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    sums = (wide @ wide.mT).abs().sum(-1, keepdim=True)
    near = quintic(wide * sums.clamp(min=torch.finfo(wide.dtype).tiny).rsqrt(), TUNED)
    return near.mT if is_tall else near


EXPORT = TurboMuon
