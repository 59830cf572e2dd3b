"""Make differentiable operations of kernels: a first derivative that refuses to be differentiated again, where torch's
own wrappers would be silently wrong, and a rule for the second order along a line where the kernel brings one."""

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
    """A function of tensors that kernels compute, ``operation(*tensors, **settings)``. A tensor may be None (an input
    that is left out); settings are constants.

    - ``forward(*tensors, **settings) -> (out, saved)``: the output, one tensor or a tuple of them (an input may be
      one), and a tuple of what backward needs beside the inputs.
    - ``backward(gradient, needed, saved, *tensors, **settings)``: one gradient for each tensor, None for one that
      ``needed`` (bools) does not ask for. It is not differentiable. ``gradient``: of the output; where that is a tuple,
      a tuple of one for each, zeros for one that nothing depends on.
    - ``second_order(*parts, **settings) -> parts``: of each tensor (f, f′, f″) along a line, where None is zero, to
      those of the output (of a tuple: a tuple of them), computed by kernels as well. None: there is no such rule, and
      `stability.curvature` says so with this operation's name.

    Differentiated twice by autograd it raises a ``RuntimeError`` that names it, and so does forward mode: torch would
    give wrong numbers for the one and zeros for the other.
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
        if has_torch_function(given):  # a tensor that carries derivatives of its own: whoever made it knows what to do
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
    """The gradient of `_First`. It takes the inputs, too, so that whoever differentiates it by them comes here: torch's
    ``once_differentiable`` is left out, without a word, where another path leads to what is differentiated by."""

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
