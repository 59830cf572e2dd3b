"""Combine an optimizer for a model's matrices with AdamW for the rest.

AdamW has its own learning rate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.groups import LR_SCALE
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.optimizers._groups import KIND, MATRICES, REST, SPLITS, kind_of, set_lr

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


class MatrixSettings(Settings):
    """Settings of AdamW for all parameters except matrices; subclasses add the matrices' settings."""

    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
    rest_lr_scale: float = Field(
        default=1.0, gt=0, description="learning rate of AdamW for all that is no matrix, over the run's"
    )
    rest_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's mean gradient")
    rest_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of AdamW's mean squared gradient")
    rest_epsilon: float = Field(default=1e-8, gt=0, description="added to the root of AdamW's mean squared gradient")


def own_settings(config: MatrixSettings) -> dict[str, Any]:
    """Return the settings of the matrices' optimizer by name: all fields beyond `MatrixSettings`."""
    return config.model_dump(exclude=set(MatrixSettings.model_fields))


class AbstractMatrixOptimizer(AbstractOptimizer):
    """Base of optimizers for the matrices of mixers and feed-forward networks.

    AdamW steps everything else: embeddings, head, norms, biases. A subclass implements `of_matrices`.
    """

    takes_matrices = True
    Config: ClassVar[type[MatrixSettings]]

    @classmethod
    @abstractmethod
    def of_matrices(cls, config: Any, groups: Groups) -> torch.optim.Optimizer:
        """Return the optimizer for the matrices alone, without weight decay.

        `Divided` passes each matrix as a separate tensor. All settings must be in the optimizer's groups, and all state
        in the groups and ``state``.
        """

    @classmethod
    def build(cls, config: Any, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        groups = _split_by_kind(parameters)
        for group in groups:
            group.setdefault("weight_decay", config.weight_decay)
            if group[KIND] == REST:
                group[LR_SCALE] = config.rest_lr_scale
        betas = (config.rest_beta1, config.rest_beta2)
        adamw = partial(torch.optim.AdamW, lr=1.0, betas=betas, eps=config.rest_epsilon, fused=True)
        return Divided(groups, {MATRICES: partial(cls.of_matrices, config), REST: adamw}, lr)


class Divided(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` over two: AdamW steps the `REST` groups, another the `MATRICES` groups.

    State and groups belong to this object. Each matrix is passed as a separate tensor sharing the parameter's memory. A
    parameter with several matrices (`SPLITS`) therefore counts as several, and their state is stored by number:
    ``state[parameter][number]``. Matrices are decayed here, θ ← (1 − lr·λ)θ before the step as in AdamW; the inner
    optimizer has no decay.
    """

    def __init__(self, groups: Groups, makes: dict[str, Make], lr: float):
        super().__init__(groups, {"lr": lr})
        self._made = {kind: _Made(make) for kind, make in makes.items()}
        for kind, own in self._group_by_kind().items():
            self._prepare_optimizer(kind, own)
        set_lr(self, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are in the parameters"
        for kind, own in self._group_by_kind().items():
            if kind == MATRICES:
                _decay(own)
            optimizer = self._prepare_optimizer(kind, own)
            optimizer.step()
            _keep_settings(own, optimizer.param_groups)

    def _group_by_kind(self) -> dict[str, Groups]:
        """Return the groups by kind."""
        found: dict[str, Groups] = {}
        for group in self.param_groups:
            found.setdefault(group[KIND], []).append(group)
        return found

    def _prepare_optimizer(self, kind: str, groups: Groups) -> torch.optim.Optimizer:
        """Return one kind's optimizer over these groups and their current state.

        The groups receive its settings.
        """
        if kind == REST:
            return self._made[kind].rebind(groups, self.state)
        apart: Groups = []
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for group in groups:
            held = _matrices(group)
            apart.append({**group, "params": [matrix for *_, matrix in held], "weight_decay": 0.0})
            for parameter, number, matrix in held:
                if matrix.grad is not None:
                    state[matrix] = self.state[parameter].setdefault(number, {})
        optimizer = self._made[kind].rebind(apart, state)
        _keep_settings(groups, apart)
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": self._made}


class _Made:
    """An optimizer built at first use.

    Later uses only replace its groups and state. A copy builds its own.
    """

    def __init__(self, make: Make):
        self._make, self._optimizer = make, None

    def rebind(self, groups: Groups, state: Any) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = self._make(groups)
        self._optimizer.param_groups, self._optimizer.state = groups, state
        return self._optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_optimizer": None}


def _matrices(group: dict[str, Any]) -> list[tuple[nn.Parameter, int, Tensor]]:
    """Return (parameter, number, matrix) for each matrix in a group.

    Each is a view: rows of the parameter, with the same rows of the gradient.
    """
    held = []
    for parameter, rows in zip(group["params"], group[SPLITS], strict=True):
        gradients = [None] * len(rows) if parameter.grad is None else parameter.grad.split(rows)
        for number, (matrix, gradient) in enumerate(zip(parameter.detach().split(rows), gradients, strict=True)):
            matrix.grad = gradient
            held.append((parameter, number, matrix))
    return held


def _keep_settings(groups: Groups, apart: Groups) -> None:
    """Copy settings added or changed by an inner optimizer into these groups."""
    for group, own in zip(groups, apart, strict=True):
        group.update({key: value for key, value in own.items() if key not in ("params", "weight_decay")})


def _decay(groups: Groups) -> None:
    for group in groups:
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        if group["weight_decay"] and stepped:
            torch._foreach_mul_(stepped, 1 - group["lr"] * group["weight_decay"])


def _split_by_kind(parameters: Parameters) -> Groups:
    """Return parameters as groups with `KIND` and `SPLITS`; in a plain list, two-axis parameters are matrices."""
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
