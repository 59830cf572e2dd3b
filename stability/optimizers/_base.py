"""An optimizer part is settings, and how they become a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from stability.config import Settings
from stability.config.impl import KernelUser

# as torch takes them: tensors, or groups with settings of their own
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class AbstractOptimizer(KernelUser):
    """An optimizer's settings, and how they become a ``torch.optim.Optimizer``. ``build`` makes it; the learning rate
    of each step is set from outside, through the parameter groups. Its state is tensors and plain numbers, so that a
    checkpoint can hold it.

    ``lr_reference``: the rate that ``lr=scaled`` takes multiples of, about where the optimizer is used.
    ``elementwise``: the step of each entry depends on that entry's gradients and state alone, so that a slice of a
    tensor takes the steps of the whole. ``takes_matrices``: it takes the matrices of the model and leaves the rest to
    AdamW (`stability.optimizers._divided`). ``linear_in_lr``: u = (θ⁺ − θ)/lr does not depend on lr; where it does,
    α_max is one at the run's own rate only, a multiplier of the step that was taken. ``first_step_zero``: the first
    step moves nothing, or no matrix where those are taken, but for weight decay. ``is_multiplier``: its rate multiplies
    one that it finds itself. ``frozen``: what of its state α_max holds where the checkpoint has it, in words; "" where
    a step uses nothing that it does not renew. ``averages``: what is validated and kept are means of the weights that
    it moves (`_hooks.Averaging`). ``takes_hessian``: some of its steps need an estimate of the Hessian's diagonal
    (`_hooks.TakingHessian`). ``schedules``: names of the schedules that make sense for it; None: all.
    """

    family: ClassVar[str] = "optimizers"
    Config: ClassVar[type[Settings]]
    lr_reference: ClassVar[float] = 1e-3
    elementwise: ClassVar[bool] = False
    takes_matrices: ClassVar[bool] = False
    linear_in_lr: ClassVar[bool] = True
    first_step_zero: ClassVar[bool] = False
    is_multiplier: ClassVar[bool] = False
    frozen: ClassVar[str] = ""
    averages: ClassVar[bool] = False
    takes_hessian: ClassVar[bool] = False
    schedules: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def build(cls, config: Any, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        raise NotImplementedError

    @classmethod
    def decays(cls, config: Any, parameter: nn.Parameter) -> bool:
        """Return whether weight decay reaches a parameter about which its module says nothing (``own_decay``)."""
        return True

    @classmethod
    def by_group(cls, config: Any) -> str:
        """Describe what becomes of a matrix and of a vector: equal texts for settings that no group of parameters can
        have to itself."""
        found = []
        for toy in (nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))):
            groups = cls.build(config, [toy], 1.0).param_groups
            held = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            found.append((cls.decays(config, toy), held))
        return repr(found)
