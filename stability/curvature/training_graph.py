"""A training step's gradient and its curvature along the step.

Their common part is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stability.curvature._differences import gradient_terms
from stability.curvature._directional import Directional, Problem, Sums
from stability.curvature._graph import (
    check_used,
    custom_function,
    gradient_with_graph,
    name_refusals,
    product_along,
)
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, mean_of
from stability.curvature._jet import add
from stability.curvature._vouching import check_result, find_nonfinite
from stability.curvature.products import add_origin, check_method, directional


class GradientWithGraph:
    """A batch's gradient now, and its curvature along u later.

    u follows from the gradient through the optimizer. ``loss`` is L(θ), `gradient()` is ∇L for the optimizer, and
    `along(u)` is the `Directional` along u. The optimizer may have moved the parameters by then: everything here uses
    copies of ``params`` from construction (θ before the step).

    With method "double_backward" and no ``batches``, the gradient's graph is stored until `along` or `release`. `along`
    then costs only the second backward pass, and gives ``shares``. Otherwise `along` evaluates again; by "taylor" this
    needs even less memory. The forward pass advances the global random state as in a training step; later evaluations
    replay it.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ by name.
        batches: microbatches, as in `directional`.
        method: method of `along`, as in `directional`.
        check: as in `directional`, for each `along`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Mapping[str, Tensor],
        batches: Iterable[Any] | None = None,
        method: str = "auto",
        check: bool | None = None,
    ):
        check_method(method)
        own = check_params(params)
        self.method, self.check = method, check
        self.objective, self.random = Objective(loss_fn, batches), RandomState(own)
        self.params = {name: param.detach().clone().requires_grad_() for name, param in own.items()}
        self._graph: dict[str, Tensor | None] | None = None
        self._unvouched = ""
        with torch.enable_grad():
            self.loss, self._gradient = (
                self._keep_graph() if batches is None and method == "double_backward" else self._accumulate()
            )

    def _keep_graph(self) -> tuple[float, Tensors]:
        with name_refusals():
            value, _ = next(self.objective.terms(self.params, twice=True))
            self._unvouched = custom_function(value)
            self._graph = gradient_with_graph(value, self.params)
        check_used(self._graph)
        return value.item(), {
            name: _fill_missing(gradient, self.params[name]).clone() for name, gradient in self._graph.items()
        }

    def _accumulate(self) -> tuple[float, Tensors]:
        """Return loss and gradient as means over microbatches, with one graph at a time."""
        loss = total = 0.0
        sums: dict[str, Tensor | None] = dict.fromkeys(self.params)
        for term in gradient_terms(self.objective, self.params):
            for name, gradient in term.gradients.items():
                # not in place: autograd may hand out one tensor for two parameters, or an expanded one
                sums[name] = add(sums[name], gradient)
            loss, total = loss + term.value, total + term.count
        loss = mean_of(loss, total)
        return loss, {name: _fill_missing(sums.pop(name), param).div(total) for name, param in self.params.items()}

    def gradient(self) -> Tensors:
        """Return ∇L by name, detached; zeros for an unused parameter.

        The caller may clip it in place, because it is handed out only once.

        Raises:
            RuntimeError: a second call.
        """
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            raise RuntimeError("the gradient was handed out already; keep what gradient() returned")
        return gradient

    def along(self, direction: Mapping[str, Tensor]) -> Directional:
        """Compute slope and curvature along ``direction`` at θ before the step.

        The first call uses and frees the stored graph; later ones evaluate again.
        """
        problem = Problem(self.objective, self.params, check_direction(self.params, direction), self.random)
        graph, self._graph = self._graph, None
        if graph is None:
            return self._evaluate_again(problem)
        sums = Sums(self.loss, 1.0)
        with torch.enable_grad(), name_refusals():
            sums.add(graph, product_along(graph, self.params, problem.direction), problem.direction)
        return add_origin(problem, check_result(problem, sums.result("double_backward"), self.check, self._unvouched))

    def nonfinite(self) -> str:
        """Return one line with the first non-finite parameter or module.

        It is the origin of a loss or gradient that is not finite.
        """
        ones = {name: torch.ones_like(param) for name, param in self.params.items()}
        with self.random.replay():
            return find_nonfinite(
                self.objective, {name: param.detach() for name, param in self.params.items()}, ones, self.random
            )

    def _evaluate_again(self, problem: Problem) -> Directional:
        with self.random.replay():
            return directional(
                self.objective.loss_fn,
                self.params,
                problem.direction,
                self.method,
                batches=self.objective.batches,
                check=self.check,
            )

    def release(self) -> None:
        """Free the stored graph; `along` then evaluates again."""
        self._graph = None


def _fill_missing(gradient: Tensor | None, param: Tensor) -> Tensor:
    return torch.zeros_like(param) if gradient is None else gradient.detach()
