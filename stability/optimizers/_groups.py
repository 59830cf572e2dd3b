"""Divide a model's parameters into optimizer groups; the learning rate of a step and of each group.

They are divided by weight decay, by roles with their own settings, and into matrices and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from stability.config.groups import LR_SCALE, MATRIX_ROLES, ROLES, Group
from stability.config.training import ScheduleSpec
from stability.models.scaling import STANDARD, Factors
from stability.optimizers._base import AbstractOptimizer, Parameters
from stability.registry import near_misses

KIND, SPLITS = "kind", "splits"  # entries of a parameter group
MATRICES, REST = "matrices", "rest"
OF_REST = "rest_"  # prefix of AdamW's settings in an optimizer of matrices


def optimizer_of(
    part: type[AbstractOptimizer],
    config: Any,
    groups: Sequence[Group],
    model: nn.Module,
    lr: float,
    factors: Mapping[str, Factors] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Return a part's optimizer over a model's parameters, in the model's order.

    Without ``groups``, parameters are grouped as in `parameter_groups`. With groups, the parameters of other roles come
    first. Each group's parameters follow, built with the group's settings and labelled with its role; `set_lr` scales
    their learning rate.

    Args:
        part: class of the optimizer part.
        config: its settings.
        groups: roles with their own settings.
        model: the model.
        lr: learning rate.
        factors: a parametrization's factors by parameter, on learning rate, decay and ε; none: all are 1.

    Raises:
        ValueError: as `check_roles` and `require_matrices`.
    """
    if part.takes_matrices:
        require_matrices(model, groups)
    if not groups and not factors:
        return part.build(config, group_parameters(part, config, model), lr)
    whole = None
    for group, names in _split_by_role(groups, model):
        found: dict[tuple[float, ...], list[str]] = {}
        for name in names:
            found.setdefault(factors.get(name, STANDARD).of_optimizer, []).append(name)
        for some in found.values():
            own = config if group is None else group.of(config)
            single = part.build(own, group_parameters(part, own, model, some), lr)
            for each in single.param_groups:
                _scale(each, group, factors.get(some[0], STANDARD))
            whole = single if whole is None else _join(whole, single)
    assert whole is not None, "a model has parameters"
    set_lr(whole, lr)
    return whole


def _split_by_role(groups: Sequence[Group], model: nn.Module) -> Iterator[tuple[Group | None, list[str]]]:
    """Yield the parameters of roles without own settings, under None, then each group's."""
    if not groups:
        yield None, [name for name, _ in model.named_parameters()]
        return
    played = check_roles(groups, model)
    own = {group.role for group in groups}
    if rest := [name for name, role in played.items() if role not in own]:
        yield None, rest
    for group in groups:
        yield group, [name for name, role in played.items() if role == group.role]


def _scale(each: dict[str, Any], group: Group | None, factors: Factors) -> None:
    """Scale a parameter group's settings by its role's and its tensors' factors, and name it after both."""
    by_role = 1.0 if group is None else group.lr_scale
    if group is not None or factors.lr != 1:
        each[LR_SCALE] = by_role * factors.lr * each.get(LR_SCALE, 1.0)
    if group is not None:
        each["name"] = " ".join(filter(None, (group.role, each.get("name"))))
    if factors.lr != 1:
        each["name"] = " ".join(filter(None, (each.get("name"), f"lr×{factors.lr:.4g}")))
    if factors.decay != 1 and each.get("weight_decay"):
        each["weight_decay"] *= factors.decay
    for key in ("eps", "epsilon"):
        if factors.epsilon != 1 and key in each:
            each[key] *= factors.epsilon


def check_roles(groups: Sequence[Group], model: nn.Module) -> dict[str, str]:
    """Return `roles` of a model.

    Raises:
        ValueError: there are settings for a role without parameters; one line.
    """
    played = roles(model)
    choices = tuple(role for role in ROLES if role in played.values())
    for group in groups:
        if group.role not in choices:
            raise ValueError(
                f"optimizer.groups.{group.role}: no parameter of this model plays that role; "
                f"{near_misses(group.role, choices)}"
            )
    return played


def _join(whole: torch.optim.Optimizer, single: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the first optimizer with the second's groups added; all settings are in the groups."""
    for group in single.param_groups:
        whole.add_param_group(group)
    whole.state.update(single.state)  # some optimizers create state before their first step
    return whole


def lr_factor(schedule: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the learning rate of an update over its peak; always positive.

    ``wsd`` (warm-up, stable, decay) stays at the peak until the last `ScheduleSpec.decay_steps`, then falls linearly
    (Hu et al. 2024, arXiv:2404.06395, section 4; linear: Hägele et al. 2024, arXiv:2405.18392).

    Args:
        schedule: form of the schedule.
        step: number of the update, from 1.
        num_steps: number of updates of the run.
    """
    if schedule.warmup_share is not None:
        schedule = schedule.settle(num_steps)
    if step <= schedule.warmup_steps:
        return step / (schedule.warmup_steps + 1)
    kept = num_steps - schedule.decay_steps(num_steps) if schedule.name == "wsd" else schedule.warmup_steps
    progress = max(0, step - 1 - kept) / max(1, num_steps - kept)
    floor = schedule.final_ratio
    if schedule.name in ("linear", "wsd"):
        return floor + (1 - floor) * (1 - progress)
    if schedule.name == "cosine":
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group: ``lr`` times the group's own scale, if any."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)


def roles(model: nn.Module) -> dict[str, str]:
    """Return the role of each parameter by name, one of `stability.config.groups.ROLES`.

    A module defines its parts' and parameters' roles in ``own_roles`` (name → role); the backbone and its blocks do so.
    A part without a definition inherits the role of its parent.

    Raises:
        AssertionError: a parameter has no role; the message names the parameter.
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
    """Check that an optimizer of matrices and its groups' settings apply to a model.

    Raises:
        ValueError: the model has no matrix, or a role's setting is for matrices and the role has none, or the setting
            is for AdamW and the role has only matrices; one line.
    """
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
    """Return the kind of each parameter by name: `MATRICES` or `REST`.

    If any parameter has a role, those without one are rest, e.g. a tokenizer's first and last maps. In a model without
    roles, `kind_of` judges each parameter by its axes and module.
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
    """Return `MATRICES` or `REST` for one parameter.

    A matrix has two axes and a role in `MATRIX_ROLES`, or no role and is no table. Tables are the weights of
    ``nn.Embedding`` and of modules with ``is_table``.

    Args:
        parameter: the parameter.
        role: its role, or None.
        owner: the module with this parameter, if any.
    """
    is_one = parameter.ndim == 2 and (role is None or role in MATRIX_ROLES)
    is_table = isinstance(owner, nn.Embedding) or getattr(owner, "is_table", False)
    return MATRICES if is_one and not is_table else REST


def splits(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the rows of each matrix in a fused parameter, by the parameter's id.

    A module lists its fused linear maps in ``own_splits`` (map name → rows of each matrix in order). Attention does so
    for its fused queries, keys and values.

    Raises:
        AssertionError: the rows do not add up to the weight's rows.
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


def group_parameters(
    part: type[AbstractOptimizer], config: Any, model: nn.Module, names: Iterable[str] | None = None
) -> Parameters:
    """Return the parameters in the form of a part's ``build``.

    If the part has ``takes_matrices``, matrices and rest form separate groups with their `KIND`. Matrix groups also
    have `SPLITS`, the rows of each parameter's matrices (`splits`). Otherwise the result is `parameter_groups`.

    Args:
        part: class of the optimizer part.
        config: its settings.
        model: the model.
        names: parameters to include; None: all.
    """
    decays = partial(part.decays, config)
    if not part.takes_matrices:
        return parameter_groups(model, decays, names)
    of_kind, rows = kinds(model), splits(model)
    wanted, groups = list(of_kind if names is None else names), []
    for kind in (MATRICES, REST):
        listed: list[Any] = list(parameter_groups(model, decays, [name for name in wanted if of_kind[name] == kind]))
        for each in listed if not listed or isinstance(listed[0], dict) else [{"params": listed}]:
            own: dict[str, Any] = {KIND: kind, "name": f"{kind} {each.get('name') or ''}".rstrip()}
            if kind == MATRICES:
                own[SPLITS] = [rows.get(id(parameter), (len(parameter),)) for parameter in each["params"]]
            groups.append(each | own)
    return groups


def parameter_groups(
    model: nn.Module, decays: Callable[[nn.Parameter], bool], names: Iterable[str] | None = None
) -> Parameters:
    """Return a model's parameters, grouped by weight decay if some are not decayed.

    The two groups have the names decayed and undecayed. A module can set the decay of its own parameters in
    ``own_decay`` (name → bool), as residual schemes do; ``decays`` decides for the others.

    Args:
        model: the model.
        decays: whether weight decay applies to a parameter.
        names: parameters to include; None: all.

    Returns:
        Parameters in the model's order, or groups with each in that order.
    """
    own = {
        id(module.get_parameter(name)): decayed
        for module in model.modules()
        for name, decayed in getattr(module, "own_decay", {}).items()
    }
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
