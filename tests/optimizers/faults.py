"""Optimizers with one planted fault each: all descend with momentum and weight decay, so that only the fault differs."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.optimizers import AbstractOptimizer


class Descent(torch.optim.Optimizer):
    """v ← μv + g + λθ, θ ← θ − αv."""

    def __init__(self, parameters: Any, lr: float, momentum: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                gradient = value.grad + self.decay(group) * value
                velocity = self.velocity(value)
                velocity.mul_(group["momentum"]).add_(gradient)
                value.sub_(self.rate(group) * self.direction(velocity, gradient, group))

    def velocity(self, value: Tensor) -> Tensor:
        return self.state[value].setdefault("velocity", torch.zeros_like(value))

    def decay(self, group: dict[str, Any]) -> float:
        return group["weight_decay"]

    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"]

    def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return velocity


class Sound(AbstractOptimizer):
    """The one without a fault."""

    elementwise = True
    optimizer = Descent

    class Config(Settings):
        momentum: float = Field(default=0.9, ge=0, lt=1)
        weight_decay: float = Field(default=0.1, ge=0)

    @classmethod
    def build(cls, config: Any, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return cls.optimizer(parameters, lr, config.momentum, config.weight_decay)

    @classmethod
    def decays(cls, config: Any, parameter: Any) -> bool:
        return parameter.ndim >= 2


class LeavesVectorsAlone(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return velocity if velocity.ndim > 1 else torch.zeros_like(velocity)


class StepsByItsNorm(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            held = next(value for value, state in self.state.items() if state["velocity"] is velocity)
            return held.norm() * velocity


class DividesByRows(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return velocity / gradient.norm(dim=-1, keepdim=True)


class Random(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return velocity + 1e-3 * torch.rand_like(velocity)


class CapsItsRate(Sound):
    class optimizer(Descent):
        def rate(self, group: dict[str, Any]) -> float:
            return min(group["lr"], 0.1)


class KeepsAnObject(Sound):
    class optimizer(Descent):
        def velocity(self, value: Tensor) -> Tensor:
            self.state[value].setdefault("rule", type(self))
            return super().velocity(value)


class KeepsStateOutside(Sound):
    class optimizer(Descent):
        def velocity(self, value: Tensor) -> Tensor:
            self.outside: dict[Tensor, Tensor] = getattr(self, "outside", {})
            return self.outside.setdefault(value, torch.zeros_like(value))


class DecaysEverything(Sound):
    class optimizer(Descent):
        def decay(self, group: dict[str, Any]) -> float:
            return 0.1


class GrowsByItsDecay(Sound):
    class optimizer(Descent):
        def decay(self, group: dict[str, Any]) -> float:
            return -group["weight_decay"]


class NormalisesTheTensor(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return velocity / velocity.norm()


class KeepsRowSums(Sound):
    class optimizer(Descent):
        def velocity(self, value: Tensor) -> Tensor:
            self.state[value].setdefault("rows", torch.zeros(value.shape[:1] + (1,) * value.ndim))
            return super().velocity(value)


class LooksAhead(Sound):
    """Nesterov's momentum."""

    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return gradient + group["momentum"] * velocity


class IgnoresMomentum(Sound):
    class optimizer(Descent):
        def direction(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
            return gradient
