"""Exact L, ⟨∇L, u⟩ and uᵀHu from one forward pass.

The pass carries (f, f′, f″) along θ + tu, and stores no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# Imported to register their rules.
import stability.curvature._rules_activations
import stability.curvature._rules_layers
import stability.curvature._rules_linear
import stability.curvature._rules_losses
import stability.curvature._rules_pointwise
import stability.curvature._rules_products
import stability.curvature._rules_reductions  # noqa: F401
from stability.curvature._inputs import Objective, RandomState, Tensors, check_count, check_params, mean_of
from stability.curvature._jet import Jet, NoRule, parts
from stability.curvature._trees import Tree, accept_any_tree

__all__ = ["NoRule", "missing_rule", "taylor_sums"]


def taylor_sums(
    objective: Objective, params: Tensors, direction: Tensors, random: RandomState
) -> tuple[float, float, float]:
    """Compute (L, slope, curvature), one microbatch at a time.

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        random: random state of the evaluation.

    Raises:
        NoRule: an operation has no rule or would drop derivatives; the message names it.
        ValueError: the loss depends on none of the parameters.
    """

    def function(at: Tensors, along: Tensors, batch: tuple[Any, ...]) -> list[Any]:
        jets = {name: Jet(param.detach(), along[name]) for name, param in at.items()}
        value, count = objective.term(jets, *batch, twice=True)
        if not isinstance(value, Jet):
            raise ValueError(
                "the loss depends on none of params; loss_fn must use the tensors it is given "
                "(torch.func.functional_call)"
            )
        return [count, *parts(value)]

    sums, total = [0.0, 0.0, 0.0], 0.0
    with random.replay(), torch.enable_grad():  # gradients on: `_refuse_drops` thus detects a no_grad block
        for count, *found in objective.evaluate("taylor", function, dict(params), direction):
            sums = [
                total_of + (0.0 if part is None else part.item()) for total_of, part in zip(sums, found, strict=True)
            ]
            total += check_count(count)
    loss, slope, curvature = (mean_of(part, total) for part in sums)
    return loss, slope, curvature


@accept_any_tree
def missing_rule(loss_fn: Callable[..., Any], params: Tree, *, batches: Iterable[Any] | None = None) -> str | None:
    """Name the operation of a loss without a taylor rule.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        batches: microbatches, as in `directional`.

    Returns:
        The reason why taylor cannot differentiate this loss, or None if it can.
    """
    params = check_params(params)
    try:
        taylor_sums(
            Objective(loss_fn, batches),
            params,
            {name: torch.ones_like(param) for name, param in params.items()},
            RandomState(params),
        )
    except NoRule as error:
        return str(error)
    return None
