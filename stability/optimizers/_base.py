"""An optimizer part is settings, and how they become a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from stability.config import Settings

# as torch takes them: tensors, or groups with settings of their own
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class AbstractOptimizer:
    """An optimizer's settings, and how they become a ``torch.optim.Optimizer``. ``build`` makes it; the learning rate
    of each step is set from outside, through the parameter groups.

    ``elementwise``: the step of each entry depends on that entry's gradients and state alone, so that a slice of a
    tensor takes the steps of the whole.
    """

    family: ClassVar[str] = "optimizers"
    Config: ClassVar[type[Settings]]
    elementwise: ClassVar[bool] = False

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
