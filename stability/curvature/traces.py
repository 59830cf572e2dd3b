"""Estimate the Hessian's trace and diagonal from products with random vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import check_params
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature.lanczos import Operator, hessian_operator, unflatten
from stability.curvature.products import hvp
from stability.curvature.spectrum import standard_error


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: tr H.
        standard_error: of the sampled part; 0 if the sketch contained all of H, NaN from fewer than two samples.
        products: Hessian-vector products used.
    """

    value: float
    standard_error: float
    products: int


@accept_any_tree
def trace(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    batches: Iterable[Any] | None = None,
    products: int = 30,
    seed: int = 0,
) -> Trace:
    """Estimate tr H by Hutch++ (Meyer et al. 2021, arXiv:2010.09649, Algorithm 1).

    A third of the products sketches the range of H (Q = orth(H S)). A third gives tr(QᵀHQ) exactly. A third samples the
    trace of (I − QQᵀ)H(I − QQᵀ) with Rademacher vectors; their scatter gives the standard error. Exact for a Hessian of
    rank ≤ products/3.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.
        products: number of Hessian-vector products, at least 3.
        seed: seed of the probes.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: ``products`` below 3, or as in `hvp`.
    """
    if products < 3:
        raise ValueError(f"products is {products}; Hutch++ needs at least 3")
    operator, generator = hessian_operator(loss_fn, params, batches), torch.Generator().manual_seed(seed)
    third = products // 3
    sketched = torch.stack([operator.apply(operator.probe(generator)) for _ in range(min(third, operator.size))], dim=1)
    if not bool(sketched.isfinite().all()):
        return Trace(math.nan, math.nan, sketched.shape[1])
    range_of = _orthonormal(sketched)

    def draw_outside() -> Tensor:
        z = operator.probe(generator)
        for _ in range(2):
            z = z - range_of @ (range_of.T @ z)
        return z

    inside = float(_quadratic_forms(operator, range_of.T).sum())
    beside = _quadratic_forms(operator, (draw_outside() for _ in range(third)))
    return Trace(inside + float(beside.mean()), standard_error(beside), sketched.shape[1] + range_of.shape[1] + third)


@accept_any_tree
def hutchinson_trace(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    batches: Iterable[Any] | None = None,
    products: int = 30,
    seed: int = 0,
) -> Trace:
    """Estimate tr H by the mean of zᵀHz over Rademacher vectors z (Hutchinson 1989).

    `trace` needs fewer products if a few eigenvalues make up most of the trace.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.
        products: number of z, one Hessian-vector product each.
        seed: seed of the z.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: ``products`` below 1, or as in `hvp`.
    """
    if products < 1:
        raise ValueError(f"products is {products}; at least one is needed")
    operator, generator = hessian_operator(loss_fn, params, batches), torch.Generator().manual_seed(seed)
    samples = _quadratic_forms(operator, (operator.probe(generator) for _ in range(products)))
    return Trace(float(samples.mean()), standard_error(samples), products)


def _quadratic_forms(operator: Operator, vectors: Iterable[Tensor]) -> Tensor:
    """Return zᵀHz of each vector in float64, by one product each."""
    return torch.tensor([float(z.double() @ operator.apply(z).double()) for z in vectors], dtype=torch.float64)


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis (n, r) of the columns' span."""
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    # directions below rounding are left out, so a low rank remains low
    return left[:, sizes > sizes[0] * torch.finfo(columns.dtype).eps * max(columns.shape)]


@dataclass(frozen=True)
class Diagonal:
    """An estimate of the Hessian's diagonal.

    Attributes:
        value: the diagonal, with the structure of the parameters.
        standard_error: of each entry, with the same structure; NaN from one sample.
        samples: number of random vectors.
    """

    value: Tree
    standard_error: Tree
    samples: int


@accept_any_tree
def hessian_diagonal(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    batches: Iterable[Any] | None = None,
    samples: int = 30,
    seed: int = 0,
) -> Diagonal:
    """Estimate the Hessian's diagonal by the mean of z ⊙ Hz.

    The z are Rademacher vectors (Bekas et al. 2007).

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.
        samples: number of z, one Hessian-vector product each.
        seed: seed of the z.

    Returns:
        The diagonal with the standard error of each entry.

    Raises:
        ValueError: ``samples`` below 1, or as in `hvp`.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; at least one is needed")
    params = check_params(params)
    operator, generator = hessian_operator(loss_fn, params, batches), torch.Generator().manual_seed(seed)
    total = squares = torch.zeros(operator.size, dtype=operator.dtype, device=operator.device)
    for _ in range(samples):
        z = operator.probe(generator)
        estimate = z * operator.apply(z)
        total, squares = total + estimate, squares + estimate * estimate
    mean = total / samples
    variance = (squares - samples * mean * mean).clamp_min(0) / (samples - 1) if samples > 1 else mean * math.nan
    return Diagonal(unflatten(mean, params), unflatten((variance / samples).sqrt(), params), samples)


@accept_any_tree
def hutchinson_diagonal(
    loss_fn: Callable[..., Any],
    params: Tree,
    *,
    generator: torch.Generator,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Tree:
    """Estimate the Hessian's diagonal by one z ⊙ Hz.

    The entries of z are independent N(0, 1); the mean of z ⊙ Hz is the diagonal (Hutchinson 1989; Liu et al. 2023,
    Algorithm 1).

    Args:
        loss_fn: the loss, as in `hvp`.
        params: θ, as in `hvp`.
        generator: on the CPU, for any device. z depends only on it and on the order of names, not on the microbatches.
        batches: microbatches, as in `hvp`.
        check: as in `hvp`.

    Returns:
        z ⊙ Hz with the structure of ``params``.
    """
    probe = {
        name: torch.randn(param.shape, generator=generator, dtype=param.dtype).to(param.device)
        for name, param in check_params(params).items()
    }
    product = hvp(loss_fn, params, probe, batches=batches, check=check)
    return {name: z * product[name] for name, z in probe.items()}
