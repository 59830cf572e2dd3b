"""A base for hand-written optimizers, and an AdamW with two overridable parts.

Subclasses change the gradient before AdamW's means or the direction after them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from stability.config import Settings
from stability.optimizers._base import Parameters

Group = dict[str, Any]
Tensors = list[Tensor]


class ByHand(torch.optim.Optimizer):
    """A hand-written optimizer; it steps one parameter group after another.

    Its settings are entries of the groups, beside ``step``, the 1-based number of the current step. A subclass
    implements `advance`.
    """

    def __init__(self, parameters: Parameters, lr: float, config: Settings):
        settings = config.model_dump()
        decay = settings.pop("weight_decay")  # last: a checkpoint's bytes depend on the order
        super().__init__(parameters, {"lr": lr, **settings, "weight_decay": decay, "step": 0})

    @abstractmethod
    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Perform one group's step in place, without changing the gradients.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are in the parameters"
        for group in self.param_groups:
            group["step"] += 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.advance(group, params, [param.grad for param in params])

    def get_state(self, params: Tensors, key: str) -> Tensors:
        """Return one state tensor for each parameter, initially zeros."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param)
        return [self.state[param][key] for param in params]

    def update_means(self, group: Group, params: Tensors, gradients: Tensors) -> tuple[Tensors, Tensors]:
        """Add gradients to Adam's two means, not corrected for their start, and return them.

        Args:
            group: the parameter group with ``beta1`` and ``beta2``.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        means, squares = self.get_state(params, "exp_avg"), self.get_state(params, "exp_avg_sq")
        torch._foreach_lerp_(means, gradients, 1 - group["beta1"])
        torch._foreach_mul_(squares, group["beta2"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["beta2"])
        return means, squares


class BaseAdamW(ByHand):
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2); the decay is scaled by the learning rate.

    A subclass overrides `correct_gradients`, `move` or both. Settings: ``beta1``, ``beta2``, ``epsilon``,
    ``weight_decay``.
    """

    def correct_gradients(self, group: Group, params: Tensors, gradients: Tensors) -> Tensors:
        """Return the input of the two means, one tensor for each gradient.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        return gradients

    def move(self, group: Group, params: Tensors, gradients: Tensors, directions: Tensors) -> None:
        """Perform the step in place.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
            directions: m̂/(√v̂ + ε) for each parameter; may be changed in place.
        """
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-group["lr"])

    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Add `correct_gradients` to the two means, then `move` along their ratio.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        beta1, beta2, step = group["beta1"], group["beta2"], group["step"]
        means, squares = self.update_means(group, params, self.correct_gradients(group, params, gradients))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, group["epsilon"])
        directions = torch._foreach_div(means, 1 - beta1**step)
        torch._foreach_div_(directions, roots)
        self.move(group, params, gradients, list(directions))
