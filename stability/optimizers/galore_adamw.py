"""GaLore (Zhao et al. 2024): Adam in a low-rank projection for matrices, AdamW for all else."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings, own_settings


class LowRankAdam(torch.optim.Optimizer):
    """Move each matrix (m, n), m ≤ n, by θ ← θ − lr·s·PN.

    N is Adam's step for PᵀG with rank r and two bias-corrected means. P consists of the gradient's first r left
    singular vectors, recomputed every ``every`` steps. A tall matrix is projected from the right (Zhao et al. 2024,
    arXiv:2403.03507, Algorithm 2). The means are kept when P changes, as in the paper.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                is_tall = matrix.shape[0] > matrix.shape[1]
                direction = self._direction(self.state[matrix], matrix.grad.mT if is_tall else matrix.grad, group)
                matrix.sub_(direction.mT if is_tall else direction, alpha=group["lr"] * group["scale"])

    def _direction(self, state: dict[str, Any], wide: Tensor, group: dict[str, Any]) -> Tensor:
        """Return PN for a wide or square gradient, and update the state."""
        step = state["step"] = state.get("step", 0) + 1
        if (step - 1) % group["every"] == 0:
            state["projection"] = first_directions(wide, math.ceil(group["rank_share"] * len(wide)))
        low = state["projection"].mT @ wide
        mean = state.setdefault("mean", torch.zeros_like(low))
        square = state.setdefault("square", torch.zeros_like(low))
        mean.lerp_(low, 1 - group["beta1"])
        square.lerp_(low.square(), 1 - group["beta2"])
        root = (square / (1 - group["beta2"] ** step)).sqrt() + group["epsilon"]
        return state["projection"] @ (mean / (1 - group["beta1"] ** step) / root)


class GaLoreAdamW(AbstractMatrixOptimizer):
    """AdamW with its means in a low-rank projection of the gradient.

    Zhao et al. 2024, arXiv:2403.03507, Algorithm 2. The rank is a share of the shorter side, as in the paper (1/4 to
    1/2, Table 2), not one number for all widths.
    """

    lr_reference = 1e-2
    frozen = "the projection P, but in a step that renews it"

    class Config(MatrixSettings):
        rank_share: float = Field(default=0.25, gt=0, le=1, description="rank over a matrix's shorter side, rounded up")
        every: int = Field(default=200, ge=1, description="steps between renewals of the projection")
        scale: float = Field(default=0.25, gt=0, description="factor of a matrix's step")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean projected gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared projected gradient")
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return LowRankAdam(groups, own_settings(config))


def first_directions(wide: Tensor, rank: int) -> Tensor:
    """Return a matrix's first left singular vectors.

    Each vector's sign makes its largest entry positive. The means carried into a new basis then do not depend on the
    library's choice of signs.

    Args:
        wide: (m, n).
        rank: number of vectors.

    Returns:
        Vectors as columns, (m, rank).
    """
    vectors = torch.linalg.svd(wide, full_matrices=False).U[:, :rank]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


EXPORT = GaLoreAdamW
