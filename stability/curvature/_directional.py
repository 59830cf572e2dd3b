"""Second-order derivatives along a line: inputs, running sums and result.

Double backward computes the sums, one microbatch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stability.curvature._graph import (
    check_used,
    custom_function,
    gradient_with_graph,
    name_refusals,
    product_along,
)
from stability.curvature._inputs import Objective, RandomState, Tensors, dot, mean_of
from stability.curvature.alpha_max import alpha_max


@dataclass(frozen=True)
class Directional:
    """The loss along θ + αu to second order: L + α·slope + α²·curvature/2.

    Attributes:
        loss: L(θ).
        slope: ⟨∇L, u⟩.
        curvature: uᵀHu.
        alpha_max: Eq. 18 from these; NaN if any of the three is not finite.
        method: the method that gave the curvature.
        rel_error: |a − b| / max(|a|, |b|) of the curvature against central differences; None without a check.
        error_bar: error bound of the curvature, with method finite_difference.
        shares: u_b·(Hu)_b by parameter, adding up to the curvature; None if the method gives none.
        nonfinite: the first parameter or module with a non-finite number; None if all are finite.
        difference: the b of ``rel_error``.
        note: doubts, with method finite_difference or a custom Function: the gradient is not the loss's derivative, or
            differences could not check the Function. None without a doubt.
    """

    loss: float
    slope: float
    curvature: float
    alpha_max: float
    method: str
    rel_error: float | None = None
    error_bar: float | None = None
    shares: dict[str, float] | None = field(default=None, repr=False, hash=False)
    nonfinite: str | None = None
    difference: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Problem:
    """Inputs of every method: the loss, θ, u and the random state."""

    objective: Objective
    params: Tensors
    direction: Tensors
    random: RandomState


@dataclass
class Sums:
    """Running sums over microbatches, accumulated in float64.

    Attributes:
        loss: Σ of the losses.
        count: Σ of the counts.
        slope: Σ ⟨∇, u⟩.
        shares: Σ u_b·(Hu)_b by parameter.
    """

    loss: float = 0.0
    count: float = 0.0
    slope: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def add(
        self, gradients: Mapping[str, Tensor | None], products: Mapping[str, Tensor | None], direction: Tensors
    ) -> None:
        """Add one microbatch's slope and shares.

        Args:
            gradients: ∇ by name; None is zero.
            products: H u by name; None is zero.
            direction: u by name.
        """
        for name, step in direction.items():
            gradient, product = gradients[name], products[name]
            self.slope += 0.0 if gradient is None else dot(gradient, step)
            self.shares[name] = self.shares.get(name, 0.0) + (0.0 if product is None else dot(product, step))

    def result(self, method: str) -> Directional:
        shares = {name: mean_of(share, self.count) for name, share in self.shares.items()}
        return numbers_of(
            mean_of(self.loss, self.count), mean_of(self.slope, self.count), sum(shares.values()), method, shares=shares
        )


def numbers_of(loss: float, slope: float, curvature: float, method: str, **extra: Any) -> Directional:
    """Return a `Directional` with the α_max of its numbers.

    Args:
        loss: L(θ).
        slope: ⟨∇L, u⟩.
        curvature: uᵀHu.
        method: the method that gave them.
        **extra: further fields.
    """
    ratio = alpha_max(slope, curvature) if math.isfinite(loss) else math.nan
    return Directional(loss, slope, curvature, ratio, method, **extra)


def double_backward_sums(problem: Problem) -> tuple[Sums, str]:
    """Compute the sums by double backward (reverse over reverse).

    Returns:
        The sums, and the name of a custom Function in the graph ("" without one).
    """
    leaves = {name: param.detach().requires_grad_() for name, param in problem.params.items()}
    sums, unvouched = Sums(), ""
    with problem.random.replay(), torch.enable_grad(), name_refusals():
        for value, count in problem.objective.terms(leaves, twice=True):
            unvouched = unvouched or custom_function(value)
            gradients = gradient_with_graph(value, leaves)
            check_used(gradients)
            sums.add(gradients, product_along(gradients, leaves, problem.direction), problem.direction)
            sums.loss, sums.count = sums.loss + value.item(), sums.count + count
            del value, gradients  # before the next microbatch builds its graph
    return sums, unvouched
