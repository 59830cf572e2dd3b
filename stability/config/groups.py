"""Optimizer settings by parameter role: ``optimizer.groups.mixer.lr_scale=0.5``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from stability.config.base import Settings, validate
from stability.registry import near_misses

GROUPS = "groups"  # key in an optimizer's plain values, beside its own settings
LR_SCALE = "lr_scale"
# The roles of parameters; modules assign them to their submodules (`own_roles`).
ROLES = ("embedding", "position", "norm", "mixer", "cross", "residual", "ffn", "condition", "head")
# roles whose 2-D parameters map one hidden state to another; matrix optimizers update only these
MATRIX_ROLES = ("mixer", "cross", "ffn")


class Group(Settings):
    """The optimizer settings of one role's parameters."""

    role: str = Field(description=f"the role: {', '.join(ROLES)}")
    lr_scale: float = Field(
        default=1.0,
        ge=0,
        description="factor on the run's learning rate; 0: these parameters keep their initial values",
    )
    settings: tuple[tuple[str, Any], ...] = Field(
        default=(), description="settings of the optimizer that differ for these parameters"
    )

    def dump(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, without neutral ones."""
        own: dict[str, Any] = dict(self.model_dump(mode="json")["settings"])
        return ({} if self.lr_scale == 1.0 else {LR_SCALE: self.lr_scale}) | own

    def of(self, config: Settings) -> Settings:
        """Return the optimizer's Config for this role, from its Config for all parameters."""
        return type(config).model_validate({**config.model_dump(), **dict(self.settings)})


def parse_groups(optimizer: Any, name: str, config: Settings, values: Any) -> tuple[Group, ...]:
    """Parse ``optimizer.groups`` into groups in the order of `ROLES`, without neutral ones.

    Args:
        optimizer: class of the part.
        name: name of the part.
        config: its settings for all parameters.
        values: ``{role: {setting: value}}``; null means the value for all parameters.

    Raises:
        ValueError: the values are no such dict, a role is unknown, or a setting is unknown or cannot differ by role;
            one line.
    """
    given = _require_dict(values, f"optimizer.{GROUPS}", "ROLE.lr_scale=0.5")
    for role in given:
        if role not in ROLES:
            raise ValueError(f"optimizer.{GROUPS}.{role}: no such role of a parameter; {near_misses(role, ROLES)}")
    groups = (_parse_group(optimizer, name, config, role, given[role]) for role in ROLES if role in given)
    return tuple(group for group in groups if group.dump())


def _parse_group(optimizer: Any, name: str, config: Settings, role: str, values: Any) -> Group:
    """Return one role's group, validated by the optimizer's Config; errors as in `parse_groups`."""
    path, fields = f"optimizer.{GROUPS}.{role}", type(config).model_fields
    given = {key: value for key, value in _require_dict(values, path, "lr_scale=0.5").items() if value is not None}
    for key in given:
        if key not in (LR_SCALE, *fields):
            raise ValueError(f"{path}.{key}: {name} has no such setting; {near_misses(key, (LR_SCALE, *fields))}")
    scale = {LR_SCALE: given.pop(LR_SCALE)} if LR_SCALE in given else {}
    if scale and optimizer.is_multiplier:
        raise ValueError(f"{path}.{LR_SCALE}: {name} finds one rate for all parameters; leave {LR_SCALE} out")
    own = validate(type(config), {**config.model_dump(), **given}, path)
    settings = tuple((key, getattr(own, key)) for key in fields if key in given)
    group = validate(Group, {"role": role, **scale, "settings": settings}, path)
    for key, value in group.settings:
        changed = config.model_copy(update={key: value})
        if changed != config and optimizer.by_group(changed) == optimizer.by_group(config):
            raise ValueError(f"{path}.{key}: {name} has one {key} for all parameters; write optimizer.{name}.{key}=…")
    return group


def _require_dict(values: Any, path: str, example: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}={values!r}: takes settings, not a value; e.g. {path}.{example}")
    return {str(key): value for key, value in values.items()}


def share_groups(axis: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep's optimizers, each with the groups shared by all.

    The input is Hydra's ``{"adamw": {…}, "groups": {…}}``. An optimizer's own value for a role has precedence.
    """
    shared = _require_dict(axis[GROUPS], f"optimizer.{GROUPS}", "ROLE.lr_scale=0.5")

    def add_shared(settings: Any) -> Any:
        if not isinstance(settings or {}, dict):
            return settings  # refused as such
        own = (settings or {}).get(GROUPS, {})
        roles = {role: _merge_role(shared.get(role), own.get(role)) for role in {**shared, **own}}
        return {**(settings or {}), GROUPS: roles}

    return {name: add_shared(settings) for name, settings in axis.items() if name != GROUPS}


def _merge_role(shared: Any, own: Any) -> Any:
    return {**shared, **own} if isinstance(shared, dict) and isinstance(own, dict) else shared if own is None else own


def expand_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's plain values with every role and setting in its groups.

    Values not given are neutral: null, and a scale of 1. Paths into the groups can then be resolved.
    """
    neutral = {LR_SCALE: 1.0} | {key: None for key in values if key not in ("name", GROUPS)}
    return {**values, GROUPS: {role: {**neutral, **values.get(GROUPS, {}).get(role, {})} for role in ROLES}}
