"""GaLore (Zhao et al. 2024): matrices step by Adam in a few directions of their gradient, all else by AdamW."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings, own_settings


class LowRankAdam(torch.optim.Optimizer):
    """Move each matrix (m, n), m ≤ n, by θ ← θ − lr·s·PN: N is Adam's step, of its two bias-corrected means, for PᵀG
    of rank r, and P holds the gradient's first r left singular vectors, found anew every ``every`` steps; a tall matrix
    is projected from the right (Zhao et al. 2024, arXiv:2403.03507, Algorithm 2). The means go on across a new P, as
    the paper's do.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                is_tall = matrix.shape[0] > matrix.shape[1]
                direction = self._direction(self.state[matrix], matrix.grad.mT if is_tall else matrix.grad, group)
                matrix.sub_(direction.mT if is_tall else direction, alpha=group["lr"] * group["scale"])

    def _direction(self, state: dict[str, Any], wide: Tensor, group: dict[str, Any]) -> Tensor:
        """Return PN of a gradient of no more rows than columns, and renew its state."""
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
    """AdamW whose means are kept of a projection of the gradient to low rank (Zhao et al. 2024, arXiv:2403.03507,
    Algorithm 2). The rank is a share of the shorter side, as the paper's are (1/4 to 1/2, Table 2), and not one number
    for all widths."""

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
    """Return the first ``rank`` left singular vectors of a matrix (m, n) as columns (m, rank), each with the sign that
    makes its largest entry positive: the means that go on in a new basis do not hang on a library's choice."""
    vectors = torch.linalg.svd(wide, full_matrices=False).U[:, :rank]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


EXPORT = GaLoreAdamW
