"""Gradients of an objective, one microbatch after another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stability.curvature._autocast import Autocast, record_autocasts
from stability.curvature._graph import check_used, graph_nodes, plain_gradient
from stability.curvature._inputs import Objective, Tensors, check_count
from stability.curvature.recorded import RecordedLoss


class GradientTerm(NamedTuple):
    """One microbatch's gradient.

    Attributes:
        value: the loss's sum.
        count: its count.
        gradients: ∂value/∂θ by name; None for an unused parameter.
        precision: eps of the narrowest type in the computation; NaN if not requested.
    """

    value: float
    count: float
    gradients: dict[str, Tensor | None]
    precision: float


def gradient_terms(objective: Objective, params: Tensors, *, precise: bool = False) -> Iterator[GradientTerm]:
    """Yield each microbatch's gradient; only one graph exists at a time.

    Args:
        objective: the loss.
        params: θ by name.
        precise: whether to find the precision, which takes a walk over the graph.

    Raises:
        ValueError: the loss depends on none of the parameters.
    """
    precise |= isinstance(objective.loss_fn, RecordedLoss)  # a recording has one graph for all its runs

    def function(at: Tensors, batch: tuple[Any, ...]) -> list[Any]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
        with record_autocasts() as autocasts:
            value, count = objective.term(leaves, *batch, twice=False)
        precision = precision_of(value, leaves, autocasts.entries) if precise else math.nan
        gradients = plain_gradient(value, leaves)
        check_used(gradients)
        return [value.detach(), count, precision, *gradients.values()]

    for value, count, precision, *gradients in objective.evaluate("gradient", function, dict(params)):
        yield GradientTerm(value.item(), check_count(count), dict(zip(params, gradients, strict=True)), precision)


def precision_of(value: Tensor, params: Tensors, inside: Iterable[Autocast]) -> float:
    """Return the eps of the narrowest type in a loss's computation.

    Args:
        value: the loss, or outputs, with its graph.
        params: the tensors it was computed from.
        inside: autocasts entered by the loss. The graph alone is not enough: it shows only the ends of a compiled part.
    """
    devices = {param.device.type for param in params.values()}
    types = {param.dtype for param in params.values()}
    types |= {entry.dtype for node in graph_nodes(value) for entry in getattr(node, "_input_metadata", ())}
    types |= {each.dtype for each in inside if each.device in devices and each.gradients}
    types |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return max(torch.finfo(each).eps for each in types if each.is_floating_point)
