"""Tensors of a model beside those of a smaller one of the same kind: what grew, and by which factors it is scaled.

Classes of tensors as in Yang et al. 2022 (arXiv:2203.03466), Appendix B, and the package ``mup``: by the number of axes
that grow with the model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

Shape = tuple[int, ...]
Kind = Literal["finite", "vector", "matrix", "output"]
HEAD, BLOCKS = "head.", "blocks."  # beginnings of parameters' names


class TensorSize(NamedTuple):
    """A parameter's growth over the base model's.

    Attributes:
        kind: "finite": no axis grows; "vector": one does; "output": one does, and a linear map sums over it; "matrix":
            two do.
        fan_in: growth of the axis that a map sums over, the last one unless ``own_fan_in`` of its module names another;
            of a linear map's bias, that of its weight.
        fan_out: growth of the axis before; 1 for one axis.
        width: growth of the axis that grows (vector, output), else `fan_in`.
        is_inside: whether it belongs to a block.
        is_head: whether it belongs to the head.
        module: "linear", "table" (of embeddings) or "other".
        shape: own shape.
        base_shape: shape in the base model.
    """

    kind: Kind
    fan_in: float
    fan_out: float
    width: float
    is_inside: bool
    is_head: bool
    module: Literal["linear", "table", "other"]
    shape: Shape
    base_shape: Shape

    @property
    def is_inner_map(self) -> bool:
        """Whether it is a map before the head that sums over a growing axis."""
        return self.kind == "matrix" or (self.kind == "output" and not self.is_head)


@dataclass(frozen=True)
class Factors:
    """Factors on the standard parametrization's numbers for one tensor.

    Attributes:
        init: of its initial values.
        lr: of the learning rate.
        decay: of the weight decay λ, which the optimizer multiplies by the learning rate.
        epsilon: of Adam's ε.
    """

    init: float = 1.0
    lr: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0

    @property
    def of_optimizer(self) -> tuple[float, float, float]:
        """Those of the optimizer's settings."""
        return self.lr, self.decay, self.epsilon


STANDARD = Factors()


def find_sizes(model: nn.Module, base: Mapping[str, Shape]) -> dict[str, TensorSize]:
    """Return the size of each parameter beside the base model's.

    Args:
        model: the model.
        base: shapes of the base model's tensors by name; it has the same number of blocks.

    Raises:
        ValueError: a parameter is missing from one of them, or has more than two growing axes; one line.
    """
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    base = {name: base[name] for name in own if name in base}  # without buffers
    if own.keys() != base.keys() or any(len(own[name]) != len(base[name]) for name in own):
        odd = sorted({name for name in own if len(own[name]) != len(base.get(name, ()))} | base.keys() - own.keys())
        raise ValueError(
            f"the base model has other parameters than this one, e.g. {odd[0]}; its width alone may differ"
        )
    return {name: _find_size(model, name, own, base) for name in own}


def _find_size(model: nn.Module, name: str, own: Mapping[str, Shape], base: Mapping[str, Shape]) -> TensorSize:
    shape, before = own[name], base[name]
    growth = [here / there for here, there in zip(shape, before, strict=True)]
    grown = [place for place, ratio in enumerate(growth) if ratio != 1]
    if len(grown) > 2:
        raise ValueError(f"{name} {shape} has {len(grown)} axes that grow with the width; no rule scales more than two")
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    module = "linear" if isinstance(owner, nn.Linear) else "table" if isinstance(owner, nn.Embedding) else "other"
    summed: dict[str, int] = getattr(owner, "own_fan_in", {"weight": len(shape) - 1} if module == "linear" else {})
    axis = summed.get(leaf, len(shape) - 1)
    fan_in, fan_out = (growth[axis], growth[axis - 1]) if len(growth) > 1 else (1.0, 1.0)
    if module == "linear" and leaf == "bias":
        fan_in = own[f"{path}.weight"][-1] / base[f"{path}.weight"][-1]
    kind: Kind = "finite" if not grown else "matrix" if len(grown) == 2 else "vector"
    if kind == "vector" and leaf in summed and grown == [axis]:
        kind = "output"
    width = growth[grown[0]] if len(grown) == 1 else fan_in
    is_inside, is_head = name.startswith(BLOCKS), name.startswith(HEAD)
    return TensorSize(kind, fan_in, fan_out, width, is_inside, is_head, module, shape, before)


@torch.no_grad()
def scale_initial_values(model: nn.Module, factors: Mapping[str, Factors], own_init: set[int]) -> None:
    """Scale each parameter by its factor.

    Args:
        model: the initialised model.
        factors: by parameter's name.
        own_init: ids of the parameters that keep their modules' own start.
    """
    for name, parameter in model.named_parameters():
        factor = factors[name].init
        if factor != 1 and id(parameter) not in own_init:
            parameter.mul_(factor)
