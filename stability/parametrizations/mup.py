"""`mup`: the maximal-update parametrization (Yang et al. 2022, arXiv:2203.03466), as in the package ``mup``."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from stability.models.scaling import Factors, TensorSize
from stability.parametrizations._base import AbstractParametrization, Growth, WidthSettings


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

    With m the width over the base's, m_in and m_out the growth of a tensor's fan-in and fan-out:

    - initial values: hidden matrices fall as 1/√m_in, as torch's already do; the head's weights keep their size.
    - forward: the head's input is multiplied by 1/m. The width of an attention head is the same at every width.
    - learning rate, Adam and sign: hidden matrices 1/m_in, all else 1. SGD: hidden matrices m_out/m_in, all else with a
      growing axis m. Orthogonalised steps: √(m_out/m_in) over what the optimizer's own factor grew by.
    - decay (independent): the reciprocal of the learning rate's factor. Adam's ε: 1/m.
    """

    class Config(MupSettings):
        pass

    @classmethod
    def factors(cls, config: Any, name: str, size: TensorSize, growth: Growth) -> Factors:
        lr = _rate(size, growth, growth.update(name))
        decay = 1 / lr if config.weight_decay == "independent" else 1.0
        is_scaled = config.epsilon == "scaled" and growth.update(name) == "adam"
        return Factors(_init(config, size, growth.rule), lr, decay, 1 / growth.width if is_scaled else 1.0)

    @classmethod
    def readout(cls, config: Any, growth: Growth) -> float:
        return 1 / growth.width


def _init(config: Any, size: TensorSize, rule: str) -> float:
    """Return the factor on what a rule of initial values gives at this width."""
    if size.kind == "output":
        if config.readout == "zero":
            return 0.0
        return 1.0 if rule == "nanogpt" else math.sqrt(size.fan_in)  # drawn with a deviation of 1/√fan-in
    if size.kind == "matrix":
        return 1 / math.sqrt(size.fan_in) if rule == "nanogpt" else 1.0
    if size.is_linear_bias and rule in ("torch", "sedd"):  # drawn as its weight
        return math.sqrt(size.fan_in)
    is_table = len(size.shape) == 2 and size.kind == "vector"
    return math.sqrt(size.width) if rule == "sedd" and is_table else 1.0


def _rate(size: TensorSize, growth: Growth, update: str) -> float:
    """Return the factor on the learning rate."""
    if update == "sgd":
        return 1.0 if size.kind == "finite" else size.fan_out / size.fan_in if size.kind == "matrix" else size.width
    if update == "orthogonal":
        return math.sqrt(size.fan_out / size.fan_in) / growth.built_in(size)
    return 1 / size.fan_in if size.kind == "matrix" else 1.0


EXPORT = Mup
