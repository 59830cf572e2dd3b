"""Slope and curvature of a loss along a direction, and Hessian-vector products.

They work on dicts of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from stability.curvature._differences import (
    PARITY_EPSILON,
    curvature_of,
    pair_at,
    pairs_at,
    relative_error,
    slope_at,
    slope_note,
)
from stability.curvature._directional import Directional, Problem, double_backward_sums, numbers_of
from stability.curvature._graph import (
    NoSecondDerivative,
    check_used,
    custom_function,
    gradient_with_graph,
    name_refusals,
    product_along,
)
from stability.curvature._inputs import Objective, RandomState, check_direction, check_params, dot, mean_of
from stability.curvature._jet import HeldConstant, NoRule
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature._vouching import check_result, compare, find_nonfinite
from stability.curvature._warnings import warn
from stability.curvature.taylor import taylor_sums

METHODS = ("auto", "taylor", "double_backward", "finite_difference", "parity")
BY_DIFFERENCES = ("finite_difference", "parity")


@accept_any_tree
def directional(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    method: str = "auto",
    *,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Directional:
    """Compute loss, slope, curvature and α_max of ``loss_fn`` at ``params`` along ``direction``.

    Each evaluation starts from the current global random state, which is unchanged afterwards. A NaN remains a NaN with
    every method.

    Args:
        loss_fn: ``loss_fn(params) -> scalar``, or with ``batches`` ``loss_fn(params, batch) -> (sum, count)``: L = Σ
            sum / Σ count, one microbatch at a time.
        params: θ: a dict of tensors, or any nesting of lists, tuples and dicts.
        direction: u, of the same structure and shapes.
        method: "taylor" (exact, one forward pass, no stored activations; `NoRule` for an operation without a rule),
            "double_backward" (exact; `NoSecondDerivative` if one is missing), "finite_difference" (central differences
            of gradients at ‖εu‖ = 1e-2 and 3e-3, with an error bar), "parity" (the paper's raw ε = 1e-4, for comparison
            only), or "auto": the first of the first three supported by the loss. "auto" warns if it uses differences.
            It also warns if a part of the loss is detached (`detach`, `item`, `no_grad`): double backward treats this
            part as a constant, like the training step's gradient.
        batches: microbatches, each given to ``loss_fn``.
        check: True: compare the curvature with central differences, stored as `rel_error`. None: only for double
            backward through a custom `autograd.Function`, because its derivatives are not guaranteed; a second
            derivative contradicted by differences counts as missing.

    Returns:
        The numbers, with the method that gave them.

    Raises:
        ValueError: parameters, direction or loss do not fit.
        NoRule: with method "taylor", as above.
        NoSecondDerivative: with method "double_backward", as above.
    """
    check_method(method)
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    evaluate = {
        "auto": _compute_by_any,
        "taylor": _compute_by_taylor,
        "double_backward": _compute_by_double_backward,
    }.get(method)
    return add_origin(
        problem, _compute_by_differences(problem, method, bool(check)) if evaluate is None else evaluate(problem, check)
    )


@accept_any_tree
def hvp(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    batches: Iterable[Any] | None = None,
    check: bool | None = None,
) -> Tree:
    """Compute H u by double backward (reverse over reverse, correct through LayerNorm).

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        batches: microbatches, as in `directional`.
        check: compare uᵀHu with differences of gradients along u. None: only with a custom `autograd.Function` in the
            graph; False: never.

    Returns:
        H u with the structure of ``params``; zeros for a leaf without influence.

    Raises:
        ValueError: as in `directional`.
        NoSecondDerivative: an operation has no second derivative, or differences contradict it.
    """
    params = check_params(params)
    problem = Problem(Objective(loss_fn, batches), params, check_direction(params, direction), RandomState(params))
    products = {name: torch.zeros_like(param.detach()) for name, param in params.items()}
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    total, unvouched = 0.0, ""
    with problem.random.replay(), torch.enable_grad(), name_refusals():
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
        note = compare(problem, curvature, unvouched)[1]
        if note:
            warn(note)
    return products


def _compute_by_any(problem: Problem, check: bool | None) -> Directional:
    """Compute by taylor, else by double backward, else by central differences."""
    # a NaN is no reason for the next method
    unforeseen = None
    try:
        return _compute_by_taylor(problem, check)
    except HeldConstant as error:
        unforeseen = f"{error}; autograd takes for a constant what is detached, and so does this number"
    except NoRule:
        pass  # double backward is as exact, and the result names it
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        # The code does not support tensor subclasses. If it is the loss's own error, double backward raises it again.
        unforeseen = f"{type(error).__name__}: {error}"
    try:
        result = _compute_by_double_backward(problem, check)
    except NoSecondDerivative as error:
        announce(error)
        return _compute_by_differences(problem, "finite_difference", bool(check))
    # taylor cannot tell a custom Function from a no_grad block; with a rel_error it was checked
    if unforeseen is not None and result.rel_error is None:
        warn(f"curvature by double backward, because taylor failed: {unforeseen}")
    return result


def _compute_by_taylor(problem: Problem, check: bool | None) -> Directional:
    return check_result(
        problem,
        numbers_of(*taylor_sums(problem.objective, problem.params, problem.direction, problem.random), "taylor"),
        bool(check),
    )


def _compute_by_double_backward(problem: Problem, check: bool | None) -> Directional:
    """Compute by reverse over reverse; by default, check custom Functions by differences."""
    sums, unvouched = double_backward_sums(problem)
    return check_result(problem, sums.result("double_backward"), check, unvouched)


def _compute_by_differences(problem: Problem, method: str, check: bool) -> Directional:
    center = slope_at(problem.objective, problem.params, problem.direction, 0.0, problem.random)
    if method == "finite_difference":
        pairs = pairs_at(problem.objective, problem.params, problem.direction, problem.random)
        curvature, bar = curvature_of(pairs, problem.direction)
        # only its own two displacements can be compared
        share = relative_error(curvature, curvature - bar) if check else None
        note = slope_note(center, pairs)
        return numbers_of(center.loss, center.slope, curvature, method, rel_error=share, error_bar=bar, note=note)
    pair = pair_at(problem.objective, problem.params, problem.direction, PARITY_EPSILON, problem.random)
    return check_result(problem, numbers_of(center.loss, center.slope, pair.curvature, method), check)


def add_origin(problem: Problem, result: Directional) -> Directional:
    """Return the result with the origin of a non-finite number in it."""
    if math.isfinite(result.loss) and math.isfinite(result.slope) and math.isfinite(result.curvature):
        return result
    return replace(
        result, nonfinite=find_nonfinite(problem.objective, problem.params, problem.direction, problem.random)
    )


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}")


def announce(error: RuntimeError) -> None:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    warn(f"curvature by central differences of gradients, not exactly: {reason}")
