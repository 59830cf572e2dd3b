"""A mechanism of somebody's own with an operation of kernels beside its reference. The "kernels" are torch's, so that they
run everywhere; what is said of them, and refused, is what is said of real ones."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from kernels.operation import Operation
from stability.config import Settings
from stability.config.impl import Impl, Use
from stability.mechanisms import AbstractMechanism, MixerShape, without_padding

CALLS: list[torch.dtype] = []


def _forward(x: Tensor) -> Any:
    CALLS.append(x.dtype)
    assert x.dtype == torch.float32, "the kernels compute in float32 alone"
    return x**3 / 3, ()


def _backward(gradient: Tensor, needed: Any, saved: Any, x: Tensor) -> Any:
    return (gradient * x**2,)


def _second_order(x: Any) -> Any:
    x0, x1, x2 = (torch.zeros_like(x[0]) if part is None else part for part in x)
    CALLS.append(x0.dtype)
    return x0**3 / 3, x0**2 * x1, 2 * x0 * x1**2 + x0**2 * x2


CUBED = Operation("cubed", _forward, _backward, _second_order)


class Fused(AbstractMechanism):
    """y_i = W_o m^p/p, where m is the mean of W x over the valid positions, added to W x_i."""

    class Config(Settings):
        power: Literal[2, 3] = Field(default=3, description="p; of 2 there are no kernels")
        impl: Impl = "reference"

    directions = frozenset({"bidirectional"})
    kernels_second_order = True

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        self.config = config
        self.source, self.out = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, shape.width)

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        if use.head_width > 64:
            return f"heads of width {use.head_width}"
        return None if config.power == 3 else f"power={config.power}"

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        return 2.0 * num_positions * shape.width**2

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        u_BND = self.source(without_padding(x_BND, mask_BN))
        mixed_BND = u_BND + u_BND.mean(1, keepdim=True)
        if self.config.impl == "triton":
            return self.out(CUBED(mixed_BND))
        return self.out(mixed_BND**self.config.power / self.config.power)


EXPORT = Fused
