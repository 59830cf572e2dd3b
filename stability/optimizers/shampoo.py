"""Shampoo (Gupta et al. 2018) for matrices, AdamW for all else."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings, own_settings


class Preconditioned(torch.optim.Optimizer):
    """Move each matrix by θ ← θ − lr·L^(−¼) G R^(−¼), L ← L + GGᵀ and R ← R + GᵀG, which begin with εI (Gupta et al.
    2018, arXiv:1802.09568, Algorithm 1).

    A side of more than ``max_dimension`` has no factor; that of the other side is then raised to −½, so that the step
    keeps its unit (Anil et al. 2020, arXiv:2002.09018), and with neither the step is the gradient's. Powers are
    computed in every ``every``-th step, the first among them, and are part of the state only where they wait.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                matrix.sub_(self._direction(matrix, group), alpha=group["lr"])

    def _direction(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the preconditioned gradient, and renew the state."""
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
    """Gradients preconditioned from both sides by the inverse fourth roots of their summed outer products (Gupta et al.
    2018, arXiv:1802.09568). As in Adagrad the sums only grow, so that steps shrink as 1/√t; there is neither momentum
    nor grafting. By hand: pytorch_optimizer's, to which a test compares it, caps no dimension and has one interval for
    all groups."""

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
    """Return A^(−1/root) of a symmetric A (m, m) whose eigenvalues are ``smallest`` or more; those that rounding makes
    smaller are taken for that."""
    values, vectors = torch.linalg.eigh(symmetric)
    return (vectors * values.clamp(min=smallest).pow(-1 / root)) @ vectors.mT


EXPORT = Shampoo
