"""Lanczos recurrence with full reorthogonalisation, on flat vectors.

The operator may be a loss's Hessian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import Tensors, check_direction, check_params
from stability.curvature.products import hvp

_BREAKDOWN = 1e3  # in roundings of ‖T‖: a shorter new direction is noise, and the Krylov space is complete


@dataclass(frozen=True)
class Operator:
    """A symmetric n × n matrix, given by its products with flat vectors.

    Attributes:
        apply: the product with a vector (n,).
        size: n.
        dtype: dtype of the vectors.
        device: device of the vectors.
    """

    apply: Callable[[Tensor], Tensor]
    size: int
    dtype: torch.dtype
    device: torch.device

    def probe(self, generator: torch.Generator, kind: str = "rademacher") -> Tensor:
        """Draw a random vector (n,): ±1 with equal odds, or standard normal.

        It is drawn on the CPU, so a seed gives the same vector on every device.
        """
        if kind == "normal":
            return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.device, self.dtype)
        return (torch.randint(0, 2, (self.size,), generator=generator) * 2 - 1).to(self.device, self.dtype)


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors in the dict's order as one vector of their widest dtype."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Return the vector of `flatten` as tensors with the shapes and dtypes of ``like``."""
    pieces = vector.split([tensor.numel() for tensor in like.values()])
    return {
        name: piece.reshape(tensor.shape).to(tensor.dtype)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }


def hessian_operator(
    loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    batches: Iterable[Any] | None = None,
    scale: Mapping[str, Tensor] | None = None,
) -> Operator:
    """Return the Hessian of a loss as an operator on flat vectors.

    Products use double backward. The first one is compared with differences if `hvp` does so.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ by name.
        batches: microbatches, as in `directional`.
        scale: tensors s by name; the operator is then diag(s) H diag(s).
    """
    params = check_params(params)
    batches = None if batches is None else list(batches)  # one pass for each product
    factor = None if scale is None else flatten(check_direction(params, scale))
    sample = flatten({name: param[:0] if param.ndim else param for name, param in params.items()})

    check: bool | None = None

    def apply(vector: Tensor) -> Tensor:
        nonlocal check
        inside = vector if factor is None else factor * vector
        product = flatten(hvp(loss_fn, params, unflatten(inside, params), batches=batches, check=check))
        check = False
        return product if factor is None else factor * product

    return Operator(apply, sum(param.numel() for param in params.values()), sample.dtype, sample.device)


@dataclass(frozen=True)
class Krylov:
    """The result of k Lanczos steps: A Q = Q T + β q eₖᵀ.

    Attributes:
        basis: the k columns of Q, each (n,).
        values: eigenvalues of T (Ritz values), (k,) ascending, in float64.
        vectors: eigenvectors of T, (k, k), in float64.
        beta: remaining coupling β, 0 if the space is complete.
    """

    basis: tuple[Tensor, ...]
    values: Tensor
    vectors: Tensor
    beta: float

    @property
    def residuals(self) -> Tensor:
        """‖A y − θ y‖ = |β s_k| of each Ritz pair, (k,).

        An eigenvalue of A is within this distance of θ (Parlett 1998, 4.5 and 13.2).
        """
        return self.beta * self.vectors[-1].abs()

    def combine(self, weights: Tensor) -> Tensor:
        """Return Q ``weights``, (k,) → (n,)."""
        total = torch.zeros_like(self.basis[0])
        for weight, column in zip(weights.tolist(), self.basis, strict=True):
            total.add_(column, alpha=weight)
        return total


def krylov(operator: Operator, start: Tensor, iterations: int) -> Iterator[Krylov]:
    """Yield the Krylov space of ``start`` after 1, 2, … products (Lanczos 1950).

    It ends after n products or with a complete space. Each new vector is orthogonalised twice against all earlier ones
    (Parlett 1998, 6.9), so no eigenvalue appears twice. Memory: one vector of n per step. After a product that is not
    finite, the last space has eigenvalues of NaN.

    Args:
        operator: symmetric, n × n.
        start: (n,), not zero.
        iterations: largest number of products.
    """
    basis, alphas, betas = [start / start.norm()], [], []
    while len(alphas) < min(iterations, operator.size):
        product = operator.apply(basis[-1])
        alphas.append(float(product.double() @ basis[-1].double()))
        for column in basis * 2:
            product = product - (column @ product) * column
        beta = float(product.double().norm())
        if not (math.isfinite(beta) and math.isfinite(alphas[-1])):
            lost = torch.full((len(alphas),), math.nan, dtype=torch.float64)
            yield Krylov(tuple(basis), lost, torch.eye(len(alphas), dtype=torch.float64), math.nan)
            return
        values, vectors = torch.linalg.eigh(_tridiagonal(alphas, betas))
        complete = (
            beta <= _BREAKDOWN * torch.finfo(operator.dtype).eps * float(values.abs().max())
            or len(alphas) == operator.size
        )
        yield Krylov(tuple(basis), values, vectors, 0.0 if complete else beta)
        if complete:
            return
        betas.append(beta)
        basis.append(product / beta)


def _tridiagonal(alphas: list[float], betas: list[float]) -> Tensor:
    beside = torch.tensor(betas, dtype=torch.float64)
    return torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
