"""Slope, curvature and Hessian-vector products at one θ, from one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stability.curvature._directional import Directional, Sums
from stability.curvature._graph import check_used, custom_function, gradient_with_graph, name_refusals, product_along
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params
from stability.curvature.lanczos import Operator, flatten, unflatten
from stability.curvature.products import directional, hvp


class HeldHessian:
    """The Hessian of a loss at θ, for several products by double backward.

    With one batch, the graph of its gradient is kept: a product then costs only the second backward pass. With several
    microbatches, or a custom `autograd.Function` (whose derivatives `hvp` checks), each product evaluates again.

    Args:
        loss_fn: the loss with ``batches``, as in `directional`.
        params: θ by name; later changes have no effect.
        batches: the microbatches.
    """

    def __init__(self, loss_fn: Callable[..., Any], params: Mapping[str, Tensor], batches: Iterable[Any]):
        self.params = {name: param.detach().clone().requires_grad_() for name, param in check_params(params).items()}
        self._loss_fn, self._batches = loss_fn, list(batches)
        self._graph: dict[str, Tensor | None] | None = None
        self._loss = self._count = 0.0
        if len(self._batches) > 1:
            return
        with RandomState(self.params).replay(), torch.enable_grad(), name_refusals():
            value, self._count = next(Objective(loss_fn, self._batches).terms(self.params, twice=True))
            if not custom_function(value):
                self._loss, self._graph = value.item(), gradient_with_graph(value, self.params)
                check_used(self._graph)

    def along(self, direction: Mapping[str, Tensor]) -> Directional:
        """Compute slope, curvature and α_max along ``direction``."""
        if self._graph is None:
            return directional(self._loss_fn, self.params, direction, "double_backward", batches=self._batches)
        checked, sums = check_direction(self.params, direction), Sums(self._loss, self._count)
        with torch.enable_grad(), name_refusals():
            sums.add(self._graph, product_along(self._graph, self.params, checked, keep=True), checked)
        return sums.result("double_backward")

    def product(self, direction: Mapping[str, Tensor]) -> Tensors:
        """Compute H u by name."""
        if self._graph is None:
            return hvp(self._loss_fn, self.params, direction, batches=self._batches)
        with torch.enable_grad(), name_refusals():
            found = product_along(self._graph, self.params, check_direction(self.params, direction), keep=True)
        return {
            name: torch.zeros_like(self.params[name]) if part is None else part / self._count
            for name, part in found.items()
        }

    def operator(self, scale: Mapping[str, Tensor]) -> Operator:
        """Return diag(s) H diag(s) as an operator on flat vectors, with s by name."""
        factor = flatten(check_direction(self.params, scale))

        def apply(vector: Tensor) -> Tensor:
            return factor * flatten(self.product(unflatten(factor * vector, self.params)))

        return Operator(apply, factor.numel(), factor.dtype, factor.device)
