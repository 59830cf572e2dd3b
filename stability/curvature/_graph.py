"""First and second derivatives from autograd graphs.

Operations without a second derivative are detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from stability.curvature._inputs import Tensors

# Error messages of torch 2.13 and of kernels for a missing second derivative.
_REFUSALS = re.compile(
    r"derivative for .* is not implemented|differentiate twice|once_differentiable|no autograd formula was registered"
    r"|double.?backward|second derivative|don't support automatic differentiation",
    re.IGNORECASE,
)

# Operations with a silently wrong second derivative in torch 2.13: _weight_norm treats ‖v‖ as a constant (found by
# differences of losses).
_WRONG_TWICE = {
    "WeightNormInterfaceBackward0": "torch._weight_norm, as torch.nn.utils.parametrizations.weight_norm uses it,"
}


class NoSecondDerivative(RuntimeError):
    """An operation of the loss has no second derivative; the message names it."""


@contextmanager
def name_refusals() -> Iterator[None]:
    """Turn errors about missing second derivatives into `NoSecondDerivative`.

    The errors come from torch or a kernel. Any other error passes unchanged.
    """
    try:
        yield
    except NoSecondDerivative:
        raise
    except RuntimeError as error:
        if not _REFUSALS.search(str(error)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NoSecondDerivative(f"{reason}; use method='finite_difference'") from error


def custom_function(loss: Tensor) -> str:
    """Return the name of a custom `autograd.Function` in the loss's graph, or ""."""
    return next((_name(node) for node in graph_nodes(loss) if isinstance(node, BackwardCFunction)), "")


def _name(node: object) -> str:
    return type(node).__name__.removesuffix("Backward")


def _check_twice(nodes: list[object]) -> None:
    wrong = next((named for node in nodes if (named := _WRONG_TWICE.get(type(node).__name__))), None)
    if wrong is not None:
        raise NoSecondDerivative(
            f"{wrong} has a wrong second derivative in torch; use method='taylor', or 'finite_difference'"
        )


def graph_nodes(loss: Tensor) -> Iterator[object]:
    """Yield each node of the loss's autograd graph once."""
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


def gradient_with_graph(loss: Tensor, leaves: Tensors) -> dict[str, Tensor | None]:
    """Return ∂loss/∂leaf with its graph; None for an unused leaf.

    Raises:
        NoSecondDerivative: an operation would cut the graph.
    """
    if loss.grad_fn is None:
        return dict.fromkeys(leaves)
    nodes = list(graph_nodes(loss))
    _check_twice(nodes)
    # A custom Function silently drops its second derivative under autograd.grad if its backward is a kernel or is
    # marked once_differentiable (facts 7). A correct backward is linear in the incoming gradient. The seed below
    # requires a gradient, so the outgoing gradient must require one, too: a hook on each custom node checks this.
    cut: list[str] = []
    for node in (node for node in nodes if isinstance(node, BackwardCFunction)):
        node.register_hook(_watch(_name(node), cut))
    seed = torch.ones_like(loss, requires_grad=True)
    gradients = torch.autograd.grad(loss, list(leaves.values()), seed, create_graph=True, allow_unused=True)
    if cut:
        raise NoSecondDerivative(
            f"{cut[0]} (a custom autograd.Function) has no second derivative; use method='finite_difference'"
        )
    return dict(zip(leaves, gradients, strict=True))


def _watch(name: str, cut: list[str]):
    """Return a hook that appends ``name`` to ``cut`` if a backward drops the graph."""

    def hook(grad_inputs, grad_outputs):
        if not any(grad is not None and grad.requires_grad for grad in grad_outputs):
            return
        for grad in grad_inputs:
            # a backward may return plain zeros to block a path
            dropped = grad is not None and not grad.requires_grad and bool(grad.any())
            # "Error": the mark of once_differentiable
            if dropped or (grad is not None and type(grad.grad_fn).__name__ == "Error"):
                cut.append(name)

    return hook


def plain_gradient(loss: Tensor, leaves: Tensors) -> dict[str, Tensor | None]:
    """Return ∂loss/∂leaf without a graph; None for an unused leaf."""
    if loss.grad_fn is None:
        return dict.fromkeys(leaves)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


def product_along(
    gradients: dict[str, Tensor | None], leaves: Tensors, direction: Tensors, *, keep: bool = False
) -> dict[str, Tensor | None]:
    """Return H u as the gradient of ⟨∇L, u⟩ (reverse over reverse).

    Args:
        gradients: ∂L/∂leaf with its graph by name; None for an unused leaf.
        leaves: θ by name.
        direction: u by name.
        keep: whether to keep the graph for further products.

    Returns:
        H u by name; None if nothing depends on the leaf, so H u is zero.
    """
    used = [(gradient, direction[name]) for name, gradient in gradients.items() if gradient is not None]
    if not used:
        return dict.fromkeys(leaves)
    outputs, seeds = zip(*used, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=True, retain_graph=keep)
    return dict(zip(leaves, found, strict=True))


def check_used(gradients: dict[str, Tensor | None]) -> None:
    """Raise a ValueError if the loss depends on none of the parameters.

    In this case loss_fn used tensors of its own instead of the given ones.
    """
    if all(gradient is None for gradient in gradients.values()):
        raise ValueError(
            "the loss depends on none of params; loss_fn must use the tensors it is given (torch.func.functional_call)"
        )
