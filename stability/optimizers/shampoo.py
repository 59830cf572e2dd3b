"""Shampoo (Gupta et al. 2018) for matrices, AdamW for all else."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings, own_settings


class Preconditioned(torch.optim.Optimizer):
    """Move each matrix by θ ← θ − lr·L^(−¼) G R^(−¼) (Gupta et al. 2018, arXiv:1802.09568, Algorithm 1).

    L ← L + GGᵀ and R ← R + GᵀG, both starting from εI. A side longer than ``max_dimension`` has no factor. The other
    side's power is then −½, so the step keeps its unit (Anil et al. 2020, arXiv:2002.09018); without both factors the
    step is the gradient. Powers are computed at the first and then every ``every``-th step, and stored in the state
    only if ``every`` > 1.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                matrix.sub_(self._direction(matrix, group), alpha=group["lr"])

    def _direction(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the preconditioned gradient, and update the state."""
        gradient, state = matrix.grad, self.state[matrix]
        assert gradient is not None, "the caller has seen to that"
        step = state["step"] = state.get("step", -1) + 1
        sides = [side for side, length in enumerate(matrix.shape) if length <= group["max_dimension"]]
        direction = gradient
        for side in sides:
            unfolded = gradient if side == 0 else gradient.mT
            if step == 0:
                identity = torch.eye(len(unfolded), dtype=matrix.dtype, device=matrix.device)
                state[f"factor_{side}"] = group["epsilon"] * identity
            factor = state[f"factor_{side}"].addmm_(unfolded, unfolded.mT)
            if step % group["every"] == 0:
                power = inverse_root(factor, 2 * len(sides), group["epsilon"])
                state.update({f"power_{side}": power} if group["every"] > 1 else {})
            else:
                power = state[f"power_{side}"]
            direction = power @ direction if side == 0 else direction @ power
        return direction


class Shampoo(AbstractMatrixOptimizer):
    """Gradients preconditioned on both sides by inverse fourth roots of summed outer products.

    Gupta et al. 2018, arXiv:1802.09568. As in Adagrad the sums only grow, so steps shrink as 1/√t; there is neither
    momentum nor grafting. Hand-written: pytorch_optimizer's version, the reference in a test, caps no dimension and has
    one interval for all groups.
    """

    lr_reference = 0.1

    class Config(MatrixSettings):
        epsilon: float = Field(default=1e-6, gt=0, description="ε of εI, with which both factors begin")
        every: int = Field(default=1, ge=1, description="steps between computations of the factors' inverse roots")
        max_dimension: int = Field(default=8192, ge=1, description="longest side that has a factor")
        rest_lr_scale: float = Field(
            default=0.01, gt=0, description="learning rate of AdamW for all that is no matrix, over the run's"
        )

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return Preconditioned(groups, own_settings(config))


def inverse_root(symmetric: Tensor, root: int, smallest: float) -> Tensor:
    """Return A^(−1/root) for a symmetric A.

    Args:
        symmetric: A, (m, m).
        root: the root.
        smallest: lower bound of A's eigenvalues; smaller ones, due to rounding, are raised to this.
    """
    values, vectors = torch.linalg.eigh(symmetric)
    return (vectors * values.clamp(min=smallest).pow(-1 / root)) @ vectors.mT


EXPORT = Shampoo
