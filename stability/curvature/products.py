"""Compute slope and curvature of a loss along a direction, and Hessian-vector products, for dicts of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stability.curvature._autocast import switched_off
from stability.curvature._differences import (
    PARITY_EPSILON,
    curvature_of,
    pair_at,
    pairs_at,
    relative_error,
    slope_at,
    slope_note,
)
from stability.curvature._graph import (
    NoSecondDerivative,
    check_used,
    custom_function,
    gradient_with_graph,
    product_along,
    refusals_named,
)
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, dot, mean_of
from stability.curvature._jet import HeldConstant, NoRule
from stability.curvature._nonfinite import first_nonfinite
from stability.curvature._trees import Tree, any_tree
from stability.curvature._warnings import warn
from stability.curvature.alpha_max import alpha_max
from stability.curvature.taylor import taylor_sums

METHODS = ("auto", "taylor", "double_backward", "finite_difference", "parity")
BY_DIFFERENCES = ("finite_difference", "parity")
# relative, beyond the differences' own error bar: what a custom Function's second derivative may be off by and still be
# believed
AGREEMENT = 1e-2


@dataclass(frozen=True)
class Directional:
    """The loss along θ + αu to second order: L + α·slope + α²·curvature/2.

    - ``loss``: L(θ).
    - ``slope``: ⟨∇L, u⟩.
    - ``curvature``: uᵀHu.
    - ``alpha_max``: Eq. 18 from these, NaN where any of the three is not finite.
    - ``method``: the one that gave the curvature.
    - ``rel_error``: |a − b| / max(|a|, |b|) of the curvature against central differences, where asked for.
    - ``difference``: the b of ``rel_error``.
    - ``error_bar``: with method finite_difference, what the curvature may be off by.
    - ``shares``: u_b·(Hu)_b by parameter, which add up to the curvature, where the method yields them.
    - ``nonfinite``: where a number is not finite, the first parameter or module that is not.
    - ``note``: with method finite_difference, or through a custom Function, that the gradient is not the derivative of
      the loss, or that differences could not check such a Function. None where all is well.
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


@any_tree
def directional(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    method: str = "auto",
    *,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Directional:
    """Compute loss, slope, curvature and α_max of ``loss_fn`` at ``params`` along ``direction``: two dicts of tensors
    with the same keys and shapes, or any nesting of lists, tuples and dicts.

    ``loss_fn(params) -> scalar``, or with ``batches`` ``loss_fn(params, batch) -> (sum, count)``: L = Σ sum / Σ count,
    one microbatch at a time. ``method``: "taylor" (exact, one forward pass, no stored activations; `NoRule` where an
    operation has no rule), "double_backward" (exact; `NoSecondDerivative` where one is missing), "finite_difference"
    (central differences of gradients at ‖εu‖ = 1e-2 and 3e-3, with an error bar), "parity" (the paper's raw ε = 1e-4,
    for comparison only), or "auto": the first of these three that the loss allows; that it came to differences is
    announced by a warning, and so is a loss of which a part is detached (`detach`, `item`, `no_grad`): double backward
    takes that part for a constant, as the training step's gradient does. A NaN stays a NaN under every method.
    ``check=True`` compares the curvature with central differences and stores `rel_error`. None does so for double
    backward through a custom `autograd.Function`, whose second derivative nobody vouches for; where the two disagree,
    that is a missing second derivative.

    Random state: each evaluation starts from the global generators as they are now, which are left untouched.
    ValueError for params, directions and losses that do not fit.
    """
    check_method(method)
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    evaluate = {"auto": _by_any, "taylor": _by_taylor, "double_backward": _by_double_backward}.get(method)
    return with_origin(
        problem, _by_differences(problem, method, bool(check)) if evaluate is None else evaluate(problem, check)
    )


@any_tree
def hvp(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Tree:
    """Compute H u by double backward (reverse over reverse, right through LayerNorm).

    Args:
        loss_fn, params, direction, batches: as in `directional`.
        check: compare uᵀHu with differences of gradients along u. None does so where a custom `autograd.Function` is in
            the graph, False never.

    Returns:
        H u with the structure of ``params``; zeros where nothing depends.

    Raises:
        NoSecondDerivative: an operation has no second derivative, or differences contradict it.
    """
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    products = {name: torch.zeros_like(param.detach()) for name, param in params.items()}
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    total, unvouched = 0.0, ""
    with problem.random.replayed(), torch.enable_grad(), refusals_named():
        for value, count in problem.objective.terms(leaves, twice=True):
            unvouched = unvouched or custom_function(value)
            gradients = gradient_with_graph(value, leaves)
            check_used(gradients)
            for name, product in product_along(gradients, leaves, problem.direction).items():
                if product is not None:
                    products[name].add_(product)
            total += count
            del value, gradients
    mean_of(0.0, total)
    products = {name: product.div_(total) for name, product in products.items()}
    if check or (check is None and unvouched):
        curvature = sum(dot(product, problem.direction[name]) for name, product in products.items())
        note = _compared(problem, curvature, unvouched)[1]
        if note:
            warn(note)
    return products


@dataclass(frozen=True)
class Problem:
    objective: Objective
    params: Tensors
    direction: Tensors
    random: RandomState


@dataclass
class Sums:
    """Running sums of the loss, of ⟨∇, u⟩ and of u_b·(Hu)_b over microbatches, as floats, which were accumulated in
    float64."""

    loss: float = 0.0
    count: float = 0.0
    slope: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def add(
        self, gradients: Mapping[str, Tensor | None], products: Mapping[str, Tensor | None], direction: Tensors
    ) -> None:
        for name, step in direction.items():
            gradient, product = gradients[name], products[name]
            self.slope += 0.0 if gradient is None else dot(gradient, step)
            self.shares[name] = self.shares.get(name, 0.0) + (0.0 if product is None else dot(product, step))

    def result(self, method: str) -> Directional:
        shares = {name: mean_of(share, self.count) for name, share in self.shares.items()}
        return _directional(
            mean_of(self.loss, self.count), mean_of(self.slope, self.count), sum(shares.values()), method, shares=shares
        )


def _directional(loss: float, slope: float, curvature: float, method: str, **extra: Any) -> Directional:
    ratio = alpha_max(slope, curvature) if math.isfinite(loss) else math.nan
    return Directional(loss, slope, curvature, ratio, method, **extra)


def _by_any(problem: Problem, check: bool | None) -> Directional:
    """Compute by taylor; where it lacks a rule by double backward; where that lacks a second derivative, by central
    differences. A NaN is nobody's reason to go on."""
    unforeseen = None
    try:
        return _by_taylor(problem, check)
    except HeldConstant as error:
        unforeseen = f"{error}; autograd takes for a constant what is detached, and so does this number"
    except NoRule:
        pass  # double backward is as exact, and the result names it
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        # Code that no tensor subclass gets through; where it is the loss's own error, double backward raises it again.
        unforeseen = f"{type(error).__name__}: {error}"
    try:
        result = _by_double_backward(problem, check)
    except NoSecondDerivative as error:
        announce(error)
        return _by_differences(problem, "finite_difference", bool(check))
    # a custom Function looks like a no_grad block to taylor, and has been checked
    if unforeseen is not None and result.rel_error is None:
        warn(f"curvature by double backward, because taylor failed: {unforeseen}")
    return result


def _by_taylor(problem: Problem, check: bool | None) -> Directional:
    return checked(
        problem,
        _directional(*taylor_sums(problem.objective, problem.params, problem.direction, problem.random), "taylor"),
        bool(check),
    )


def _by_double_backward(problem: Problem, check: bool | None) -> Directional:
    """Reverse over reverse; checked by differences, unless told not to, where a custom Function's second derivative is
    relied on."""
    leaves = {name: param.detach().requires_grad_() for name, param in problem.params.items()}
    sums, unvouched = Sums(), ""
    with problem.random.replayed(), torch.enable_grad(), refusals_named():
        for value, count in problem.objective.terms(leaves, twice=True):
            unvouched = unvouched or custom_function(value)
            gradients = gradient_with_graph(value, leaves)
            check_used(gradients)
            sums.add(gradients, product_along(gradients, leaves, problem.direction), problem.direction)
            sums.loss, sums.count = sums.loss + value.item(), sums.count + count
            del value, gradients  # before the next microbatch builds its graph
    return checked(problem, sums.result("double_backward"), check, unvouched)


def checked(problem: Problem, result: Directional, check: bool | None, unvouched: str = "") -> Directional:
    """Return the result with what ``check`` asks for. ``unvouched``: the name of a custom Function in the graph, ""
    where there is none.

    Raises `NoSecondDerivative` where differences of gradients contradict the curvature that came through such a
    Function.
    """
    if check is False or not (check or unvouched):
        return result
    reference, note = _compared(problem, result.curvature, unvouched)
    share = relative_error(result.curvature, reference)
    return replace(result, rel_error=share, difference=reference, note=note or result.note)


def _compared(problem: Problem, curvature: float, unvouched: str) -> tuple[float, str | None]:
    """Return uᵀHu by differences, and a note if the gradient through a custom Function is not the loss's derivative, or
    if differences are too coarse to tell.

    Raises `NoSecondDerivative` where they contradict a curvature that came through such a Function.
    """
    reference, bar, doubt = _differenced(problem, unvouched)
    verdict = _verdict(unvouched, curvature, reference, bar)
    if verdict is None and unvouched:
        verdict, doubt = _verdict_in_own_types(problem, unvouched)
    if unvouched and verdict is None:
        doubt = f"{unvouched} (a custom autograd.Function): differences are too coarse here to check its derivatives"
    return reference, doubt


def _differenced(problem: Problem, unvouched: str) -> tuple[float, float, str | None]:
    """Return uᵀHu by differences with its error bar, and through a custom Function what they say of its gradient."""
    given = problem.objective, problem.params, problem.direction
    pairs = pairs_at(*given, problem.random)
    doubt = slope_note(slope_at(*given, 0.0, problem.random), pairs) if unvouched else None
    return *curvature_of(pairs, problem.direction), doubt


def _verdict(unvouched: str, curvature: float, reference: float, bar: float) -> bool | None:
    """Return True if differences confirm the curvature, None if their error exceeds both numbers; raise
    `NoSecondDerivative` if they contradict one through a custom Function. NaN contradicts nothing."""
    off, size = abs(curvature - reference), max(abs(curvature), abs(reference))
    if bar > size > 0:
        return None
    if unvouched and off > bar + AGREEMENT * size:
        raise NoSecondDerivative(
            f"{unvouched} (a custom autograd.Function) has a wrong second derivative: uᵀHu comes out as "
            f"{curvature:.4g}, by differences of gradients as {reference:.4g} ± {bar:.1g}; use "
            "method='finite_difference'"
        )
    return True


def _verdict_in_own_types(problem: Problem, unvouched: str) -> tuple[bool | None, str | None]:
    """Return `_verdict` and the note on the gradient without autocast, whose narrow types make differences coarse; None
    if the loss does not run so."""
    with switched_off({param.device.type for param in problem.params.values()}):
        try:
            curvature = _by_double_backward(problem, check=False).curvature
            reference, bar, doubt = _differenced(problem, unvouched)
        except NoSecondDerivative:
            raise
        except RuntimeError:  # types that only fit under autocast
            return None, None
    return _verdict(unvouched, curvature, reference, bar), doubt


def _by_differences(problem: Problem, method: str, check: bool) -> Directional:
    center = slope_at(problem.objective, problem.params, problem.direction, 0.0, problem.random)
    if method == "finite_difference":
        pairs = pairs_at(problem.objective, problem.params, problem.direction, problem.random)
        curvature, bar = curvature_of(pairs, problem.direction)
        # its own two displacements are all there is to compare
        share = relative_error(curvature, curvature - bar) if check else None
        note = slope_note(center, pairs)
        return _directional(center.loss, center.slope, curvature, method, rel_error=share, error_bar=bar, note=note)
    pair = pair_at(problem.objective, problem.params, problem.direction, PARITY_EPSILON, problem.random)
    return checked(problem, _directional(center.loss, center.slope, pair.curvature, method), check)


def with_origin(problem: Problem, result: Directional) -> Directional:
    """Return the result, with the origin of what is not finite in it."""
    if math.isfinite(result.loss) and math.isfinite(result.slope) and math.isfinite(result.curvature):
        return result
    return replace(
        result, nonfinite=first_nonfinite(problem.objective, problem.params, problem.direction, problem.random)
    )


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}")


def announce(error: RuntimeError) -> None:
    reason = str(error).strip().splitlines()[0]
    warn(f"curvature by central differences of gradients, not exactly: {reason}")
