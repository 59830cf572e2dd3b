"""Optimizers by hand: what each step begins with, and AdamW in two parts for those that change its gradient before or
its direction after."""

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
    """An optimizer that steps one group after another. Its settings are entries of the groups, beside ``step``, the
    number of steps taken, this one included. A subclass implements `advance`."""

    def __init__(self, parameters: Parameters, lr: float, config: Settings):
        settings = config.model_dump()
        decay = settings.pop("weight_decay")  # last: a checkpoint's bytes depend on the order
        super().__init__(parameters, {"lr": lr, **settings, "weight_decay": decay, "step": 0})

    @abstractmethod
    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Perform the step of a group's parameters in place; the gradients stay as they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are in the parameters"
        for group in self.param_groups:
            group["step"] += 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.advance(group, params, [param.grad for param in params])

    def held(self, params: Tensors, key: str) -> Tensors:
        """Return a tensor of the state of each parameter, zeros at first."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param)
        return [self.state[param][key] for param in params]


class BaseAdamW(ByHand):
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2, the decay times the learning rate), of which a subclass changes
    `taken`, `move` or both. Its settings: ``beta1``, ``beta2``, ``epsilon``, ``weight_decay``."""

    def taken(self, group: Group, params: Tensors, gradients: Tensors) -> Tensors:
        """Return what the two means are of, one tensor for each gradient."""
        return gradients

    def move(self, group: Group, params: Tensors, gradients: Tensors, directions: Tensors) -> None:
        """Perform the step in place. ``directions``: m̂/(√v̂ + ε) of each parameter, which may be changed."""
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-group["lr"])

    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Take `taken` into the two means, and `move` along their ratio."""
        beta1, beta2, step = group["beta1"], group["beta2"], group["step"]
        taken = self.taken(group, params, gradients)
        means, squares = self.held(params, "exp_avg"), self.held(params, "exp_avg_sq")
        torch._foreach_lerp_(means, taken, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, taken, taken, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, group["epsilon"])
        directions = torch._foreach_div(means, 1 - beta1**step)
        torch._foreach_div_(directions, roots)
        self.move(group, params, gradients, list(directions))
