"""Initialise a model's weights by one rule, except for modules with their own start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Rule = Literal["ours", "torch", "nanogpt", "sedd"]
NANOGPT_STD = 0.02


class WithoutNormalDraws(TorchFunctionMode):
    """A mode in which tensors are not filled with normal draws.

    On the meta device there is nothing to fill, and torch imports sympy to find that out: a second.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules on the meta device: shapes without values."""
    with torch.device("meta"), WithoutNormalDraws():
        yield


class OwnInit(nn.Module):
    """A module with its own initial values for some parameters, e.g. an open gate.

    A rule of the whole model changes only linear maps and tables of embeddings. All other parameters stay as
    constructed, and so do those in ``own_init``.
    """

    @property
    def own_init(self) -> frozenset[str]:
        """Names of the parameters that stay as constructed, also within a child (``"gate.bias"``)."""
        return frozenset()


def own_parameters(model: nn.Module) -> set[int]:
    """Return the ids of all parameters in an `OwnInit` module's ``own_init``."""
    modules = (module for module in model.modules() if isinstance(module, OwnInit))
    return {id(module.get_parameter(name)) for module in modules for name in module.own_init}


@torch.no_grad()
def initialise(model: nn.Module, num_branches: int, embedding_std: float = 1.0, rule: Rule = "ours") -> None:
    """Change the weights of a model by a rule, except those of `OwnInit`.

    - ours: no biases; branch outputs scaled by 1/√(number of branches) (Radford et al. 2019), so the size of the
      residual stream does not grow with depth; tables of embeddings scaled by ``embedding_std``.
    - torch: no change. Weights and biases of linear maps are U(±1/√(inputs)), tables N(0, 1).
    - nanogpt: weights of linear maps and tables N(0, 0.02²), branch outputs N(0, 0.02²/branches), no biases
      (github.com/karpathy/nanoGPT, model.py).
    - sedd: as torch, but tables U(±1/√width) (github.com/louaaron/Score-Entropy-Discrete-Diffusion, transformer.py; its
      head also starts at zero, by `Backbone`).

    A branch's output is its last projection, the module called ``out``. A table is an `nn.Embedding`: tokens, tracks,
    contexts; but neither patches nor positions, which have their own start.

    Args:
        model: the model, as constructed.
        num_branches: 2L for L blocks, 3L with cross branches.
        embedding_std: scale of the tables by rule "ours".
        rule: name of the rule.
    """
    own = own_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in own:
            if rule == "ours":
                module.weight.mul_(embedding_std)
            elif rule == "nanogpt":
                module.weight.normal_(0.0, NANOGPT_STD)
            elif rule == "sedd":
                module.weight.uniform_(-1 / math.sqrt(module.weight.shape[1]), 1 / math.sqrt(module.weight.shape[1]))
        if isinstance(module, nn.Linear) and rule in ("ours", "nanogpt"):
            scale = 1 / math.sqrt(num_branches) if name.rsplit(".", 1)[-1] == "out" else 1.0
            if id(module.weight) not in own and rule == "nanogpt":
                module.weight.normal_(0.0, NANOGPT_STD * scale)
            elif id(module.weight) not in own and scale != 1:
                module.weight.mul_(scale)
            if module.bias is not None and id(module.bias) not in own:
                nn.init.zeros_(module.bias)
