"""Initialise a model's weights: what a module does not start in its own way starts by a rule of the whole model."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Rule = Literal["ours", "torch", "nanogpt", "sedd"]
NANOGPT_STD = 0.02


class OwnInit(nn.Module):
    """A module whose constructor may give parameters values that are to stay, as a gate that begins open needs them.

    A rule of the whole model knows linear maps and tables of embeddings, and nothing else: what is left of the
    constructor is every other parameter, and these.
    """

    @property
    def own_init(self) -> frozenset[str]:
        """The parameters that stay as the constructor left them, by name, also one within (``"gate.bias"``)."""
        return frozenset()


def own_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that modules of the model start themselves."""
    modules = (module for module in model.modules() if isinstance(module, OwnInit))
    return {id(module.get_parameter(name)) for module in modules for name in module.own_init}


@torch.no_grad()
def initialise(model: nn.Module, num_branches: int, embedding_std: float = 1.0, rule: Rule = "ours") -> None:
    """Change what the modules' own constructors drew into what a rule says, but for what an `OwnInit` names.

    - ours: no biases; branch outputs scaled by 1/√(number of branches) (Radford et al. 2019), so that the residual
      stream keeps its size through depth; tables of embeddings scaled by ``embedding_std``.
    - torch: nothing is changed. Weights and biases of linear maps are U(±1/√(inputs)), tables N(0, 1).
    - nanogpt: weights of linear maps and tables N(0, 0.02²), branch outputs N(0, 0.02²/branches), no biases
      (github.com/karpathy/nanoGPT, model.py).
    - sedd: as torch, but tables U(±1/√width) (github.com/louaaron/Score-Entropy-Discrete-Diffusion, transformer.py;
      its head, too, starts at zero: `Backbone` does that).

    A branch's output is its last projection, the module called ``out``; ``num_branches``: 2L of them (3L with cross
    branches). A table is an `nn.Embedding`: tokens, tracks, what contexts hold; neither patches nor positions, which
    start as they say themselves.
    """
    own = own_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in own:
            _start_table(module.weight, embedding_std, rule)
        if isinstance(module, nn.Linear) and rule in ("ours", "nanogpt"):
            scale = 1 / math.sqrt(num_branches) if name.rsplit(".", 1)[-1] == "out" else 1.0
            if id(module.weight) not in own and rule == "nanogpt":
                module.weight.normal_(0.0, NANOGPT_STD * scale)
            elif id(module.weight) not in own and scale != 1:
                module.weight.mul_(scale)
            if module.bias is not None and id(module.bias) not in own:
                nn.init.zeros_(module.bias)


def _start_table(weight_VD: Tensor, std: float, rule: Rule) -> None:
    """Start a table of embeddings, which torch drew from N(0, 1)."""
    if rule == "ours":
        weight_VD.mul_(std)
    elif rule == "nanogpt":
        weight_VD.normal_(0.0, NANOGPT_STD)
    elif rule == "sedd":
        weight_VD.uniform_(-1 / math.sqrt(weight_VD.shape[1]), 1 / math.sqrt(weight_VD.shape[1]))
