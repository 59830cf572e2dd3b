"""Divide the parameters into those that weight decay reaches and the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stability.optimizers._base import Parameters


def parameter_groups(model: nn.Module, decays: Callable[[nn.Parameter], bool]) -> Parameters:
    """Return the parameters as an optimizer takes them: in the model's order, or where some are not decayed as two
    groups with ``name`` decayed and undecayed, each in that order.

    A module may say of its own parameters whether they are (``own_decay``: name → bool, as residual schemes have it);
    of the others ``decays`` does.
    """
    own = {id(parameter): decayed for module in model.modules() for parameter, decayed in _told(module)}
    parameters = list(model.parameters())
    reached = [own.get(id(parameter), decays(parameter)) for parameter in parameters]
    if all(reached):
        return parameters
    decayed, undecayed = (
        [parameter for parameter, is_reached in zip(parameters, reached, strict=True) if is_reached == wanted]
        for wanted in (True, False)
    )
    groups: list[dict[str, Any]] = [{"params": decayed, "name": "decayed"}] if decayed else []
    return [*groups, {"params": undecayed, "name": "undecayed", "weight_decay": 0.0}]


def _told(module: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    return [(module.get_parameter(name), decayed) for name, decayed in getattr(module, "own_decay", {}).items()]
