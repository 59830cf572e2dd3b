"""`mup`: the maximal-update parametrization (Yang et al. 2022, arXiv:2203.03466), as in the package ``mup``."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from stability.models.scaling import Factors, TensorSize
from stability.parametrizations import AbstractParametrization, Growth, WidthSettings


class MupSettings(WidthSettings):
    """Settings of the maximal-update parametrization."""

    epsilon: Literal["scaled", "kept"] = Field(
        default="scaled", description="Adam's ε: falls as the gradients do with the width, or is kept"
    )
    readout: Literal["scaled", "zero"] = Field(
        default="scaled", description="the head's initial weights: as large at every width, or zero"
    )


class Mup(AbstractParametrization):
    """Every activation changes by as much at every width.

    With m the width over the base's, m_in and m_out the growth of a tensor's fan-in and fan-out. Maps are hidden
    matrices, and maps before the head from a growing axis to a fixed one, e.g. to a gate of low rank. The package
    refuses the latter unless they are its ``MuReadout``, which equals these factors by symmetry.

    - initial values: hidden matrices fall as 1/√m_in, as torch's already do, maps to a fixed axis as 1/m_in; the head's
      weights keep their size.
    - forward: the head's input is multiplied by 1/m. The width of an attention head is the same at every width.
    - learning rate, Adam and sign: maps 1/m_in, all else 1. SGD: maps m_out/m_in, all else with a growing axis m.
      Orthogonalised steps: √(m_out/m_in) over what the optimizer's own factor grew by.
    - decay (independent): the reciprocal of the learning rate's factor.
    - Adam's ε falls as the gradients do: 1/m, but 1 for tensors without a growing axis and maps to a fixed axis.

    A fused map has the factors of its whole, also if its parts grow unevenly (a fixed number of key heads).
    """

    class Config(MupSettings):
        pass

    @classmethod
    def factors(cls, config: Any, name: str, size: TensorSize, growth: Growth) -> Factors:
        update = growth.update(name)
        lr = _rate(size, growth, update)
        decay = 1 / lr if config.weight_decay == "independent" else 1.0
        has_equal_gradient = size.kind == "finite" or (size.kind == "output" and not size.is_head)
        is_scaled = config.epsilon == "scaled" and update == "adam" and not has_equal_gradient
        return Factors(_init(config, size, growth.rule), lr, decay, 1 / growth.width if is_scaled else 1.0)

    @classmethod
    def readout(cls, config: Any, growth: Growth) -> float:
        return 1 / growth.width


def _init(config: Any, size: TensorSize, rule: str) -> float:
    """Return the factor on what a rule of initial values gives at this width."""
    if size.module == "table":
        return math.sqrt(size.width) if rule == "sedd" and size.kind == "vector" else 1.0
    if size.module == "other":
        return 1.0
    if len(size.shape) == 1:  # a bias; torch draws it as its weight
        return math.sqrt(size.fan_in) if rule in ("torch", "sedd") else 1.0
    if size.is_head and config.readout == "zero":
        return 0.0
    drawn = 1.0 if rule == "nanogpt" else size.fan_in**-0.5  # growth of the deviation as drawn
    return (1.0 if size.is_head else 1 / size.fan_in if size.kind == "output" else size.fan_in**-0.5) / drawn


def _rate(size: TensorSize, growth: Growth, update: str) -> float:
    """Return the factor on the learning rate."""
    if update == "orthogonal":
        return math.sqrt(size.fan_out / size.fan_in) / growth.built_in(size)
    if update == "sgd":
        return 1.0 if size.kind == "finite" else size.fan_out / size.fan_in if size.is_inner_map else size.width
    return 1 / size.fan_in if size.is_inner_map else 1.0


EXPORT = Mup
