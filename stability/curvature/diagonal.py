"""Estimate the Hessian's diagonal from products with random vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stability.curvature._inputs import check_params
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature.lanczos import hessian_operator, unflatten
from stability.curvature.products import hvp


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
