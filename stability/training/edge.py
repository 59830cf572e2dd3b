"""A training step's curvature, on its own batch at the parameters before it, for ``edge.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stability.curvature.adam import scale_by_adam
from stability.curvature.alpha_max import exact_difference, has_paper_state
from stability.curvature.held import HeldHessian
from stability.curvature.lanczos import flatten
from stability.curvature.spectrum import compute_largest
from stability.training.gradients import finite_or_none

PRODUCTS = 5  # with the Hessian, at most, for the largest eigenvalue
GROWTH = 0.03  # of the eigenvalue: a product that raises it by less is the last
TOLERANCE = 0.05  # of the eigenvalue: its error is smaller, about the residual's square over the spectral gap


class Edge:
    """α_max along the step, and Adam's preconditioned sharpness over its threshold.

    The sharpness is the largest Ritz value of the Krylov space of the last measurement's eigenvector, after at most
    `PRODUCTS` products: a power iteration that keeps all its vectors.

    Args:
        every: interval in steps; None: never.

    Attributes:
        start: last eigenvector (n,) in the preconditioned coordinates; part of a checkpoint.
    """

    def __init__(self, every: int | None):
        self._every = every
        self.start: Tensor | None = None

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def measure(
        self,
        loss: Callable[..., Any],
        before: Mapping[str, Tensor],
        batches: Sequence[Any],
        optimizer: Optimizer,
        after: Mapping[str, Tensor],
        lr: float,
    ) -> dict[str, float | None]:
        """Return the columns of a step that was taken; None for a number that is not finite.

        Args:
            loss: ``loss(params, batch)`` → (sum, count).
            before: θ before the step, by name.
            batches: the step's microbatches.
            optimizer: the optimizer after the step; P holds the step's own gradient, as in the step.
            after: the optimizer's own tensors, by name.
            lr: α of the step.
        """
        hessian = HeldHessian(loss, before, batches)
        direction = {
            name: exact_difference(after[name].detach(), start).div_(lr).to(start.dtype)
            for name, start in before.items()
        }
        along = hessian.along(direction)
        row = {"slope": along.slope, "curvature": along.curvature, "alpha_max": along.alpha_max, "alpha": lr}
        if has_paper_state(optimizer):
            scale, threshold = scale_by_adam(optimizer, after, lr)
            start = None if self.start is None else self.start.to(flatten(before))
            found = compute_largest(hessian.operator(scale), hessian.params, TOLERANCE, PRODUCTS, 0, start, GROWTH)
            vector = flatten(found.vector)
            self.start = vector if bool(vector.isfinite().all()) else self.start
            row |= {"adam_sharpness": found.value, "adam_residual": found.residual, "adam_threshold": threshold}
            row |= {"adam_ratio": found.value / threshold, "products": found.products}
        return {name: finite_or_none(value) for name, value in row.items()}
