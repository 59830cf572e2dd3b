"""Divide the parameters into those that weight decay reaches and the others, by the roles that have settings of their
own, and into matrices and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stability.config.groups import LR_SCALE, MATRIX_ROLES, ROLES, Group
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.registry import near_misses

KIND, SPLITS = "kind", "splits"  # entries of a parameter group
MATRICES, REST = "matrices", "rest"
OF_REST = "rest_"  # with which the settings of AdamW begin in an optimizer of matrices


def optimizer_of(
    part: type[AbstractOptimizer], config: Any, groups: Sequence[Group], model: nn.Module, lr: float
) -> torch.optim.Optimizer:
    """Return a part's optimizer over the parameters of a model in its order.

    Without ``groups`` as `parameter_groups` has them. With groups, the parameters of roles without one come first, as
    there, then those of each group, which are built by its own settings and bear its name; ``lr`` and every rate that
    `set_lr` sets is scaled in them. Errors: as `check_roles`.
    """
    if part.takes_matrices:
        require_matrices(model, groups)
    if not groups:
        return part.build(config, grouped(part, config, model), lr)
    played = check_roles(groups, model)
    own = {group.role for group in groups}
    rest = [name for name, role in played.items() if role not in own]
    whole = _built(part, config, model, rest, lr) if rest else None
    for group in groups:
        names = [name for name, role in played.items() if role == group.role]
        single = _built(part, group.of(config), model, names, lr)
        for each in single.param_groups:
            scale = group.lr_scale * each.get(LR_SCALE, 1.0)
            each |= {"name": " ".join(filter(None, (group.role, each.get("name")))), LR_SCALE: scale}
        whole = single if whole is None else _joined(whole, single)
    assert whole is not None, "there is a group"
    set_lr(whole, lr)
    return whole


def check_roles(groups: Sequence[Group], model: nn.Module) -> dict[str, str]:
    """Return `roles` of a model. Errors: ``ValueError`` of one line where there are settings for a role that no
    parameter plays."""
    played = roles(model)
    choices = tuple(role for role in ROLES if role in played.values())
    for group in groups:
        if group.role not in choices:
            raise ValueError(
                f"optimizer.groups.{group.role}: no parameter of this model plays that role; "
                f"{near_misses(group.role, choices)}"
            )
    return played


def _built(
    part: type[AbstractOptimizer], config: Any, model: nn.Module, names: Sequence[str], lr: float
) -> torch.optim.Optimizer:
    return part.build(config, grouped(part, config, model, names), lr)


def _joined(whole: torch.optim.Optimizer, single: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the first optimizer with the groups of the second, whose settings are all in them."""
    for group in single.param_groups:
        whole.add_param_group(group)
    whole.state.update(single.state)  # some make it before their first step
    return whole


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, ``lr`` times the group's own scale where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)


def roles(model: nn.Module) -> dict[str, str]:
    """Return the role of each parameter by its name, one of `stability.config.groups.ROLES`.

    A module says of its parts and parameters which roles they play (``own_roles``: name → role), as the backbone and
    its blocks do; what says nothing plays the role of what it is built into. Errors: ``AssertionError`` that names a
    parameter without a role.
    """
    found = {name: _role(model, name) for name, _ in model.named_parameters()}
    for name, role in found.items():
        assert role in ROLES, f"{name} plays {'no role' if role is None else role}: own_roles of a module that holds it"
    return {name: str(role) for name, role in found.items()}


def _role(model: nn.Module, name: str) -> str | None:
    held, role = model, None
    for step in name.split("."):
        role = getattr(held, "own_roles", {}).get(step, role)
        held = getattr(held, step)
    return role


def require_matrices(model: nn.Module, groups: Sequence[Group] = ()) -> None:
    """Raise a ``ValueError`` of one line where a model has nothing that an optimizer of matrices takes, or a role that
    has none, or nothing else, has a setting for them."""
    found = kinds(model)
    if MATRICES not in found.values():
        raise ValueError(
            "the optimizer takes matrices, and this model has none: no parameter of two axes in a mixer or a "
            "feed-forward network; choose another optimizer, e.g. adamw"
        )
    for group in groups:
        held = {kind for name, kind in found.items() if _role(model, name) == group.role}
        for key, _ in group.settings:
            kind = REST if key.startswith(OF_REST) else MATRICES
            if held and key != "weight_decay" and kind not in held:
                told = "is a matrix; AdamW steps them" if kind == MATRICES else "is AdamW's; all are matrices"
                raise ValueError(f"optimizer.groups.{group.role}.{key}: no parameter of that role {told}")


def kinds(model: nn.Module) -> dict[str, str]:
    """Return of each parameter by its name whether an optimizer of matrices takes it (`MATRICES`) or not (`REST`).

    Where some parameters play a role, those that play none are rest, as a tokenizer's first and last maps are; of a
    model that knows no roles at all every parameter is judged by its axes and its module (`kind_of`).
    """
    played = {name: _role(model, name) for name, _ in model.named_parameters()}
    knows_roles = any(played.values())
    found = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_outside = knows_roles and played[name] is None
        found[name] = REST if is_outside else kind_of(parameter, played[name], owner)
    return found


def kind_of(parameter: nn.Parameter, role: str | None, owner: nn.Module | None = None) -> str:
    """Return `MATRICES` for a parameter of two axes whose role is among `MATRIX_ROLES`, or that has no role and is no
    table; else `REST`. A table is that of an ``nn.Embedding``, or of a module that says so (``is_table``)."""
    is_one = parameter.ndim == 2 and (role is None or role in MATRIX_ROLES)
    is_table = isinstance(owner, nn.Embedding) or getattr(owner, "is_table", False)
    return MATRICES if is_one and not is_table else REST


def splits(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the rows of each matrix in a parameter that holds several one above the other, by the parameter's id.

    A module says so of its linear maps (``own_splits``: name of the map → rows of each matrix, in their order), as
    attention does of its fused queries, keys and values. Errors: ``AssertionError`` where the rows are not those of the
    weight.
    """
    found = {}
    for module in model.modules():
        own: dict[str, Any] = getattr(module, "own_splits", {})
        for name, rows in own.items():
            weight = module.get_parameter(f"{name}.weight")
            assert sum(rows) == len(weight), (
                f"own_splits of {name}: {rows} are not the {len(weight)} rows of its weight"
            )
            found[id(weight)] = tuple(rows)
    return found


def grouped(
    part: type[AbstractOptimizer], config: Any, model: nn.Module, names: Iterable[str] | None = None
) -> Parameters:
    """Return the parameters as a part's ``build`` takes them. ``names``: which of them; None: all.

    As `parameter_groups` has them; for a part that ``takes_matrices`` those of the matrices, each with `SPLITS`, the
    rows of the matrices in each parameter (`splits`), and those of the rest, all of them under their `KIND`.
    """
    decays = partial(part.decays, config)
    if not part.takes_matrices:
        return parameter_groups(model, decays, names)
    of_kind, rows = kinds(model), splits(model)
    wanted, groups = list(of_kind if names is None else names), []
    for kind in (MATRICES, REST):
        for each in _named(parameter_groups(model, decays, [name for name in wanted if of_kind[name] == kind])):
            own: dict[str, Any] = {KIND: kind, "name": " ".join(filter(None, (kind, each.get("name"))))}
            if kind == MATRICES:
                own[SPLITS] = [rows.get(id(parameter), (len(parameter),)) for parameter in each["params"]]
            groups.append(each | own)
    return groups


def _named(parameters: Parameters) -> list[dict[str, Any]]:
    """Return parameters as groups; none where there are none."""
    listed: list[Any] = list(parameters)
    return listed if not listed or isinstance(listed[0], dict) else [{"params": listed}]


def parameter_groups(
    model: nn.Module, decays: Callable[[nn.Parameter], bool], names: Iterable[str] | None = None
) -> Parameters:
    """Return the parameters as an optimizer takes them: in the model's order, or where some are not decayed as two
    groups with ``name`` decayed and undecayed, each in that order. ``names``: which of them; None: all.

    A module may say of its own parameters whether they are (``own_decay``: name → bool, as residual schemes have it);
    of the others ``decays`` does.
    """
    own = {id(parameter): decayed for module in model.modules() for parameter, decayed in _told(module)}
    parameters = list(model.parameters()) if names is None else [model.get_parameter(name) for name in names]
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
