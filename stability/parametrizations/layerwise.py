"""`layerwise`: the standard model with learning rates by layer (Everett et al. 2024, arXiv:2407.05872, Table 1)."""

from __future__ import annotations

import math
from typing import Any

from stability.models.scaling import Factors, TensorSize
from stability.parametrizations import AbstractParametrization, Growth, WidthSettings


class Layerwise(AbstractParametrization):
    """Standard initial values; learning rates for full alignment.

    Adam: embedding, gains and biases 1, hidden matrices and head 1/m. SGD: √m, 1/√m and 1/m.
    """

    class Config(WidthSettings):
        pass

    @classmethod
    def factors(cls, config: Any, name: str, size: TensorSize, growth: Growth) -> Factors:
        update = growth.update(name)
        if update == "orthogonal":
            raise ValueError("parametrization=layerwise has no rates for an optimizer of matrices; choose mup")
        is_input = size.kind in ("finite", "vector")
        if update == "sgd":
            lr = 1.0 if size.kind == "finite" else math.sqrt(size.width) if is_input else _sgd_rate(size)
        else:
            lr = 1.0 if is_input else 1 / size.fan_in
        return Factors(lr=lr, decay=1 / lr if config.weight_decay == "independent" else 1.0)


def _sgd_rate(size: TensorSize) -> float:
    """Return the factor on the rate of a hidden matrix or the head."""
    return 1 / math.sqrt(size.fan_in) if size.kind == "matrix" else 1 / size.fan_in


EXPORT = Layerwise
