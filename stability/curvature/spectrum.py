"""The Hessian's spectrum from its products: outermost eigenvalues and density.

Losses and parameters are those of `directional`. Products use double backward: exact up to float32's rounding (4e-6
relative, facts 8). Each result includes the error of the estimate itself, apart from rounding. Probes come from a seed;
the global random state is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import Tensors, check_params
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature.lanczos import Krylov, Operator, hessian_operator, krylov, unflatten


@dataclass(frozen=True)
class Eigenvalue:
    """An eigenvalue estimated by Lanczos.

    Attributes:
        value: a Ritz value; it never exceeds the largest eigenvalue.
        residual: ‖Hy − value·y‖ for the unit ``vector`` y; an eigenvalue is within this distance.
        products: Hessian-vector products used.
        converged: residual ≤ tolerance·|value|.
        vector: y by name.
    """

    value: float
    residual: float
    products: int
    converged: bool
    vector: Tensors = field(repr=False, hash=False, compare=False)


@dataclass(frozen=True)
class SpectralDensity:
    """A quadrature of the spectral density φ(λ) = (1/n) Σ_i δ(λ − λ_i).

    Attributes:
        nodes: (k,), in the unit of the loss per squared parameter.
        weights: (k,), with sum 1.
        probe_of: (k,), index of each node's probe.
        probes: number of probes.
        size: n.
    """

    nodes: Tensor
    weights: Tensor
    probe_of: Tensor
    probes: int
    size: int

    def moment(self, power: int) -> tuple[float, float]:
        """Return (tr(Hᵖ)/n, its standard error over the probes); unbiased while power < 2·iterations.

        The standard error is NaN for one probe.
        """
        terms = self.weights * self.probes * self.nodes**power
        by_probe = torch.zeros(self.probes, dtype=torch.float64).index_add(0, self.probe_of, terms)
        return float(by_probe.mean()), standard_error(by_probe)

    def smoothed(self, grid: Tensor, width: float) -> Tensor:
        """Return the density at ``grid``, with nodes widened to Gaussians; (g,) → (g,).

        ``width`` is their standard deviation (Ghorbani et al. 2019, Eq. 6).
        """
        if not width > 0:
            raise ValueError(f"width is {width}; a positive standard deviation is needed")
        bells = torch.exp(-0.5 * ((grid[:, None] - self.nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return bells @ self.weights


@accept_any_tree
def top_eigenvalue(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    batches: Iterable[Any] | None = None,
    tolerance: float = 1e-2,
    iterations: int = 64,
    seed: int = 0,
) -> Eigenvalue:
    """Compute λ_max of the Hessian by Lanczos with full reorthogonalisation.

    λ_max is the sharpness of Cohen et al. 2021, arXiv:2103.00065. From a random start the largest eigenvalue is missed
    with probability zero, but the residual bound alone proves only that *some* eigenvalue is that near. Memory: one
    copy of the parameters per product. A loss with a NaN gives NaN.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.
        tolerance: stop once the residual bound is at most this share of |λ|.
        iterations: largest number of products (6–16 reach 1 %, facts 8).
        seed: seed of the start vector.

    Returns:
        The eigenpair with its residual.

    Raises:
        ValueError: as in `directional`.
    """
    params = check_params(params)
    return compute_largest(hessian_operator(loss_fn, params, batches), params, tolerance, iterations, seed)


@accept_any_tree
def eigenvalues(
    loss_fn: Callable[..., Any],
    params: Tree,
    k: int = 1,
    *,
    which: str = "largest",
    batches: Iterable[Any] | None = None,
    tolerance: float = 1e-2,
    iterations: int = 64,
    seed: int = 0,
) -> list[Eigenvalue]:
    """Compute k eigenpairs at one end of the Hessian's spectrum, by one Lanczos run.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        k: number of pairs. A multiple eigenvalue is found once, so a Hessian with fewer distinct ones gives fewer
            pairs.
        which: "largest", "smallest" (both by sign; smallest first) or "magnitude" (largest |λ| first).
        batches: microbatches, as in `directional`.
        tolerance: stop once each residual is at most this share of its |λ|.
        iterations: largest number of products, at least k.
        seed: seed of the start vector.

    Returns:
        The pairs with their residuals, the outermost first. `top_eigenvalue` explains a residual's meaning.

    Raises:
        ValueError: an unknown ``which``, ``k`` outside 1 … ``iterations``, or as in `directional`.
    """
    params = check_params(params)
    if which not in _ORDERS:
        raise ValueError(f"which is {which!r}; choose one of {', '.join(_ORDERS)}")
    operator = hessian_operator(loss_fn, params, batches)
    return _compute_outermost(operator, params, k, _ORDERS[which], tolerance, iterations, seed)


# sort keys of Ritz values
_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": torch.neg,
    "smallest": torch.clone,
    "magnitude": lambda values: -values.abs(),
}


def compute_largest(
    operator: Operator,
    params: Tensors,
    tolerance: float,
    iterations: int,
    seed: int,
    start: Tensor | None = None,
    growth: float | None = None,
) -> Eigenvalue:
    """Compute the largest Ritz value of an operator over ``params``.

    Args:
        operator: a symmetric operator.
        params: tensors with the structure of its vectors.
        tolerance: as in `top_eigenvalue`.
        iterations: as in `top_eigenvalue`.
        seed: seed of the start vector.
        start: the start vector (n,) instead, e.g. the eigenvector at nearby parameters.
        growth: stop, too, once a product raises the value by at most this share of it; None: never.
    """
    return _compute_outermost(operator, params, 1, torch.neg, tolerance, iterations, seed, start, growth)[0]


def _compute_outermost(
    operator: Operator,
    params: Tensors,
    k: int,
    order: Callable[[Tensor], Tensor],
    tolerance: float,
    iterations: int,
    seed: int,
    start: Tensor | None = None,
    growth: float | None = None,
) -> list[Eigenvalue]:
    """Compute the first k Ritz pairs in ``order``, a sort key.

    ``growth`` is that of the largest one, as in `compute_largest`.
    """
    if not 1 <= k <= iterations:
        raise ValueError(f"k={k}, iterations is {iterations}; at least one product is needed for each eigenvalue")

    def find_converged(space: Krylov) -> list[bool]:
        first = order(space.values).argsort()[:k]
        return (space.residuals[first] <= tolerance * space.values[first].abs()).tolist()

    largest: list[float] = []

    def is_done(space: Krylov) -> bool:
        largest.append(float(space.values[-1]))
        stalls = growth is not None and len(largest) > 1 and largest[-1] - largest[-2] <= growth * abs(largest[-1])
        return stalls or sum(find_converged(space)) == k

    start = operator.probe(torch.Generator().manual_seed(seed), "normal") if start is None else start
    space = _take_last(krylov(operator, start, iterations), until=is_done)
    return [
        Eigenvalue(
            float(space.values[index]),
            float(space.residuals[index]),
            len(space.values),
            converged,
            unflatten(space.combine(space.vectors[:, index]), params),
        )
        for index, converged in zip(order(space.values).argsort()[:k].tolist(), find_converged(space), strict=True)
    ]


@accept_any_tree
def spectral_density(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    batches: Iterable[Any] | None = None,
    probes: int = 4,
    iterations: int = 32,
    seed: int = 0,
) -> SpectralDensity:
    """Estimate the Hessian's spectral density by stochastic Lanczos quadrature.

    Sources: Ubaru, Chen and Saad 2017; Ghorbani et al. 2019, arXiv:1901.10159. The Ritz values of each Krylov space are
    nodes; the squared first components of their vectors are the weights.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.
        probes: number of Rademacher vectors, each with its own Krylov space.
        iterations: products per probe.
        seed: seed of the probes.

    Returns:
        The quadrature; nodes of NaN for a loss with a NaN.

    Raises:
        ValueError: ``probes`` or ``iterations`` below 1, or as in `directional`.
    """
    if probes < 1 or iterations < 1:
        raise ValueError(f"probes={probes}, iterations={iterations}: both must be at least 1")
    operator, generator = hessian_operator(loss_fn, params, batches), torch.Generator().manual_seed(seed)
    spaces = [_take_last(krylov(operator, operator.probe(generator), iterations)) for _ in range(probes)]
    nodes = torch.cat([space.values for space in spaces])
    weights = torch.cat([space.vectors[0] ** 2 for space in spaces]) / probes
    owner = torch.cat([torch.full((len(space.values),), index) for index, space in enumerate(spaces)])
    return SpectralDensity(nodes, weights, owner, probes, operator.size)


def _take_last(spaces: Iterable[Krylov], until: Callable[[Krylov], bool] = lambda space: False) -> Krylov:
    last = None
    for space in spaces:
        last = space
        if until(space):
            break
    assert last is not None
    return last


def standard_error(values: Tensor) -> float:
    """Return the standard error of the values' mean; NaN for fewer than two."""
    return float(values.std(correction=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
