"""Two optimizers are one where one takes a model's matrices and AdamW takes the rest, at a rate of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from stability.config import Settings
from stability.config.groups import LR_SCALE
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._groups import set_lr
from stability.optimizers._kinds import KIND, MATRICES, REST, SPLITS, kind_of

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


class MatrixSettings(Settings):
    """The settings of AdamW for what is no matrix; an optimizer of matrices adds its own."""

    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
    rest_lr_scale: float = Field(
        default=1.0, gt=0, description="learning rate of AdamW for all that is no matrix, over the run's"
    )
    rest_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's mean gradient")
    rest_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of AdamW's mean squared gradient")
    rest_epsilon: float = Field(default=1e-8, gt=0, description="added to the root of AdamW's mean squared gradient")


class AbstractMatrixOptimizer(AbstractOptimizer):
    """An optimizer of matrices: those of mixers and feed-forward networks. Embeddings, head, norms, biases and whatever
    else is no matrix of a block go to AdamW. A subclass implements `of_matrices`."""

    takes_matrices = True
    Config: ClassVar[type[MatrixSettings]]

    @classmethod
    @abstractmethod
    def of_matrices(cls, config: Any, groups: Groups) -> torch.optim.Optimizer:
        """Return the optimizer of the matrices alone. Each of ``groups`` has `SPLITS`: for each parameter the rows of
        the matrices that it holds."""

    @classmethod
    def build(cls, config: Any, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        groups = _of_kinds(parameters)
        for group in groups:
            group.setdefault("weight_decay", config.weight_decay)
            if group[KIND] == REST:
                group[LR_SCALE] = config.rest_lr_scale
        return Divided(groups, {MATRICES: partial(cls.of_matrices, config), REST: partial(_adamw, config)}, lr)


class Divided(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` over the groups of several: each steps those of its `KIND`; state and groups are
    this one's."""

    def __init__(self, groups: Groups, makes: dict[str, Make], lr: float):
        super().__init__(groups, {"lr": lr})
        self._inner = {kind: _Made(make) for kind, make in makes.items()}
        for kind, own in self._by_kind().items():
            self._inner[kind].over(own, self.state)
        set_lr(self, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are in the parameters"
        for kind, own in self._by_kind().items():
            self._inner[kind].over(own, self.state).step()

    def _by_kind(self) -> dict[str, Groups]:
        """Return the groups that have parameters, by kind."""
        found: dict[str, Groups] = {}
        for group in self.param_groups:
            found.setdefault(group[KIND], []).append(group)
        return found


class _Made:
    """An optimizer that is made when it is first needed, and taken over whatever groups and state there are then. A
    copy makes its own: torch's optimizers forget their attributes when they are copied."""

    def __init__(self, make: Make):
        self._make, self._optimizer = make, None

    def over(self, groups: Groups, state: Any) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = self._make(groups)
        self._optimizer.param_groups, self._optimizer.state = groups, state
        return self._optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Made:
        return _Made(self._make)


def _of_kinds(parameters: Parameters) -> Groups:
    """Return parameters as groups with `KIND` and `SPLITS`; of a plain list those of two axes are matrices."""
    listed: list[Any] = list(parameters)
    if listed and isinstance(listed[0], dict):
        return listed
    groups: Groups = []
    for kind in (MATRICES, REST):
        own: list[nn.Parameter] = [parameter for parameter in listed if kind_of(parameter, None) == kind]
        if own:
            rows = {SPLITS: [(len(parameter),) for parameter in own]} if kind == MATRICES else {}
            groups.append({"params": own, KIND: kind, "name": kind, **rows})
    return groups


def _adamw(config: MatrixSettings, groups: Groups) -> torch.optim.Optimizer:
    betas = (config.rest_beta1, config.rest_beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.rest_epsilon, fused=True)
