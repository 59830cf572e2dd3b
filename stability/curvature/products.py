"""Slope and curvature of a loss along a direction, and Hessian-vector products, for dicts of tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stability.curvature._differences import PARITY_EPSILON, curvature_at, curvature_with_error, relative_error, slope_at
from stability.curvature._graph import (
    NoSecondDerivative,
    check_used,
    custom_functions,
    gradient_with_graph,
    is_refusal,
    product_along,
)
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, dot, mean_of
from stability.curvature.alpha_max import alpha_max
from stability.curvature.taylor import taylor_sums

METHODS = ("auto", "taylor", "double_backward", "finite_difference", "parity")


@dataclass(frozen=True)
class Directional:
    """The loss along θ + αu to second order: L + α·slope + α²·curvature/2.

    ``loss``: L(θ). ``slope``: ⟨∇L, u⟩. ``curvature``: uᵀHu. ``alpha_max``: Eq. 18 from these, NaN where any of the three is not finite.
    ``method``: the one that gave the curvature. ``rel_error``: |a − b| / max(|a|, |b|) of the curvature against central differences, where
    asked for.
    ``error_bar``: with method finite_difference, what the curvature may be off by. ``shares``: u_b·(Hu)_b by parameter, which add up to
    the curvature, where the method yields them.
    """

    loss: float
    slope: float
    curvature: float
    alpha_max: float
    method: str
    rel_error: float | None = None
    error_bar: float | None = None
    shares: dict[str, float] | None = field(default=None, repr=False, hash=False)


def directional(
    loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    method: str = "auto",
    *,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Directional:
    """Loss, slope, curvature and α_max of ``loss_fn`` at ``params`` along ``direction`` (same keys and shapes).

    ``loss_fn(params) -> scalar``, or with ``batches`` ``loss_fn(params, batch) -> (sum, count)``: L = Σ sum / Σ count, one microbatch's
    graph at a time. ``method``: "double_backward" (exact), "finite_difference" (central differences of gradients at ‖εu‖ = 1e-2 and 3e-3,
    with an error bar), "parity" (the paper's raw ε = 1e-4, for comparison only), or "auto": double_backward, and finite_difference only
    where an operation has no second derivative, with a warning. A NaN stays a NaN under every method.
    ``check=True`` compares the curvature with central differences and stores `rel_error`; None does so only in "auto" when the loss holds
    a custom `autograd.Function`, whose second derivative nobody vouches for.

    Random state: each evaluation starts from the global generators as they are now, which are left untouched. Attention runs under SDPBackend.MATH.
    ValueError for params, directions and losses that do not fit; `NoSecondDerivative` from "double_backward" where one is missing.
    """
    check_method(method)
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    if method == "taylor":
        return _by_taylor(problem, bool(check))
    if method not in ("auto", "double_backward"):
        return _by_differences(problem, method, bool(check))
    try:
        exact, vouched = _double_backward(problem)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        if method == "double_backward":
            raise NoSecondDerivative(f"{error}; use method='finite_difference'") from error
        announce(error)
        return _by_differences(problem, "finite_difference", bool(check))
    wanted = check if check is not None else method == "auto" and not vouched
    return with_check(problem, exact) if wanted else exact


def hvp(
    loss_fn: Callable[..., Any], params: Mapping[str, Tensor], direction: Mapping[str, Tensor], *, batches: Iterable[Any] | None = None
) -> dict[str, Tensor]:
    """H u by double backward (reverse over reverse, right through LayerNorm), for a loss as in `directional`; zeros where nothing depends."""
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    products = {name: torch.zeros_like(param.detach()) for name, param in params.items()}
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    total = 0.0
    with problem.random.replayed(), torch.enable_grad():
        for value, count in problem.objective.terms(leaves):
            gradients = gradient_with_graph(value, leaves)
            check_used(gradients)
            for name, product in product_along(gradients, leaves, problem.direction).items():
                if product is not None:
                    products[name].add_(product)
            total += count
            del value, gradients
    mean_of(0.0, total)
    return {name: product.div_(total) for name, product in products.items()}


@dataclass(frozen=True)
class Problem:
    objective: Objective
    params: Tensors
    direction: Tensors
    random: RandomState


@dataclass
class Sums:
    """Running sums of the loss, of ⟨∇, u⟩ and of u_b·(Hu)_b over microbatches, as floats, which were accumulated in float64."""

    loss: float = 0.0
    count: float = 0.0
    slope: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def add(self, gradients: Mapping[str, Tensor | None], products: Mapping[str, Tensor | None], direction: Tensors) -> None:
        for name, step in direction.items():
            gradient, product = gradients[name], products[name]
            self.slope += 0.0 if gradient is None else dot(gradient, step)
            self.shares[name] = self.shares.get(name, 0.0) + (0.0 if product is None else dot(product, step))

    def result(self, method: str) -> Directional:
        shares = {name: mean_of(share, self.count) for name, share in self.shares.items()}
        return _directional(mean_of(self.loss, self.count), mean_of(self.slope, self.count), sum(shares.values()), method, shares=shares)


def _directional(loss: float, slope: float, curvature: float, method: str, **extra: Any) -> Directional:
    ratio = alpha_max(slope, curvature) if math.isfinite(loss) else math.nan
    return Directional(loss, slope, curvature, ratio, method, **extra)


def _double_backward(problem: Problem) -> tuple[Directional, bool]:
    """Reverse over reverse; also whether every operation is torch's own, so that its second derivative can be relied on."""
    leaves = {name: param.detach().requires_grad_() for name, param in problem.params.items()}
    sums, vouched = Sums(), True
    with problem.random.replayed(), torch.enable_grad():
        for value, count in problem.objective.terms(leaves):
            vouched = vouched and not custom_functions(value)
            gradients = gradient_with_graph(value, leaves)
            check_used(gradients)
            sums.add(gradients, product_along(gradients, leaves, problem.direction), problem.direction)
            sums.loss, sums.count = sums.loss + value.item(), sums.count + count
            del value, gradients  # before the next microbatch builds its graph
    return sums.result("double_backward"), vouched


def _by_taylor(problem: Problem, check: bool) -> Directional:
    sums = taylor_sums(problem.objective, problem.params, problem.direction, problem.random)
    result = _directional(*sums, "taylor")
    return with_check(problem, result) if check else result


def _by_differences(problem: Problem, method: str, check: bool) -> Directional:
    center = slope_at(problem.objective, problem.params, problem.direction, 0.0, problem.random)
    if method == "finite_difference":
        curvature, bar = curvature_with_error(problem.objective, problem.params, problem.direction, problem.random)
        share = relative_error(curvature, curvature - bar) if check else None  # its own two displacements are all there is to compare
        return _directional(center.loss, center.slope, curvature, method, rel_error=share, error_bar=bar)
    curvature, _ = curvature_at(problem.objective, problem.params, problem.direction, PARITY_EPSILON, problem.random)
    result = _directional(center.loss, center.slope, curvature, method)
    return with_check(problem, result) if check else result


def with_check(problem: Problem, result: Directional) -> Directional:
    reference, _ = curvature_with_error(problem.objective, problem.params, problem.direction, problem.random)
    return replace(result, rel_error=relative_error(result.curvature, reference))


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}")


def announce(error: RuntimeError) -> None:
    reason = str(error).strip().splitlines()[0]
    warnings.warn(f"curvature by central differences of gradients, not exactly: {reason}", RuntimeWarning, stacklevel=3)
