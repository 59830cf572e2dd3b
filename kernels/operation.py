"""Wrap kernels as differentiable operations with safe higher derivatives.

A second derivative by autograd raises an error: torch's own wrappers would be silently wrong. A kernel may provide a
rule for second order along a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from kernels.availability import require_device

Component = Tensor | None
Parts = tuple[Component, Component, Component]


class Operation:
    """A function computed by kernels: ``operation(*tensors, **settings)``.

    Tensors may be None (omitted inputs); settings are constants. A second derivative by autograd raises a named
    ``RuntimeError``, and so does forward mode: torch would return wrong numbers for the first and zeros for the second.

    Args:
        name: for error messages.
        forward: ``forward(*tensors, **settings) -> (out, saved)``: the output, a tensor or a tuple (an input may be
            one), and a tuple for backward besides the inputs.
        backward: ``backward(gradient, needed, saved, *tensors, **settings)``: a gradient for each tensor, None unless
            requested in ``needed`` (bools). Not differentiable. ``gradient`` is of the output; for a tuple, a tuple
            with zeros for unused outputs.
        second_order: ``second_order(*parts, **settings) -> parts``: from each tensor's (f, f′, f″) along a line, None
            for zero, to the output's (for a tuple: a tuple), also by kernels. None: no such rule; `stability.curvature`
            then names this operation.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Any, tuple[Tensor, ...]]],
        backward: Callable[..., Sequence[Component]],
        second_order: Callable[..., Parts | tuple[Parts, ...]] | None = None,
    ):
        self.__name__ = self.__qualname__ = name
        self.__module__ = forward.__module__
        self.forward, self.backward, self.second_order = forward, backward, second_order

    def __call__(self, *tensors: Tensor | None, **settings: Any) -> Any:
        given = [tensor for tensor in tensors if tensor is not None]
        if has_torch_function(given):  # a tensor class with its own derivatives handles the call
            return handle_torch_function(self, given, *tensors, **settings)
        require_device(given[0].device)
        return _First.apply(self, settings, *tensors)

    def refusal(self, what: str) -> str:
        return f"{self.__module__}.{self.__name__} has no {what}; impl=reference has one"


class _First(torch.autograd.Function):
    """The operation with its first derivative."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, settings: dict[str, Any], *tensors: Tensor | None) -> Any:
        out, saved = operation.forward(*tensors, **settings)
        ctx.operation, ctx.settings, ctx.count = operation, settings, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        about = (ctx.operation, ctx.settings, needed, ctx.count, len(gradients))
        return None, None, *_Gradient.apply(*about, *gradients, *saved)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.operation.refusal("forward mode"))


class _Gradient(torch.autograd.Function):
    """The gradient of `_First`, as a function of the inputs, too.

    Differentiating by an input thus raises an error. Torch's ``once_differentiable`` is silently bypassed by other
    paths to the input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        settings: dict[str, Any],
        needed: Sequence[bool],
        count: int,
        num_outputs: int,
        *tensors: Tensor | None,
    ) -> Any:
        ctx.operation = operation
        gradients, given = tensors[:num_outputs], tensors[num_outputs:]
        gradient = gradients if num_outputs > 1 else gradients[0]
        found = operation.backward(gradient, needed, given[count:], *given[:count], **settings)
        return tuple(each if asked else None for each, asked in zip(found, needed, strict=True))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.operation.refusal("second derivative by autograd"))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.operation.refusal("forward mode"))
