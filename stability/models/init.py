"""Initialise a model's weights: what a module does not start in its own way starts by a rule of the whole model."""

from __future__ import annotations

import math

import torch
from torch import nn


class OwnInit(nn.Module):
    """A module whose constructor may give parameters values that are to stay, as a gate that begins open needs them.

    A rule of the whole model knows linear maps and tables of embeddings, and nothing else: what is left of the
    constructor is every other parameter, and these.
    """

    @property
    def own_init(self) -> frozenset[str]:
        """The parameters that stay as the constructor left them, by name, also one within (``"gate.bias"``)."""
        return frozenset()


@torch.no_grad()
def initialise(model: nn.Module, num_branches: int, embedding_std: float = 1.0) -> None:
    """Adjust what the modules' own constructors drew: no biases, and branch outputs scaled by 1/√(number of branches)
    (Radford et al. 2019).

    A branch's last projection is the module called ``out``; with 2L branches (3L with cross branches) the residual
    stream keeps its size through depth. ``embedding_std``: the standard deviation of every table of embeddings
    (`nn.Embedding`: tokens, tracks, what contexts hold; neither patches nor positions), drawn from N(0, 1) and scaled.
    Weights that their module starts at zero (a conditioned model's modulations and head) stay there, and so does all
    that an `OwnInit` names.
    """
    own = _own(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in own:
            module.weight.mul_(embedding_std)
        if not isinstance(module, nn.Linear):
            continue
        if name.rsplit(".", 1)[-1] == "out" and id(module.weight) not in own:
            module.weight.mul_(1 / math.sqrt(num_branches))
        if module.bias is not None and id(module.bias) not in own:
            nn.init.zeros_(module.bias)


def _own(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that modules of the model start themselves."""
    modules = (module for module in model.modules() if isinstance(module, OwnInit))
    return {id(module.get_parameter(name)) for module in modules for name in module.own_init}
