"""Named choices in a spec, e.g. a mechanism or an objective, with their settings.

The Config in the part's own file validates the settings. A recipe's cross mechanism depends on its mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_serializer

from stability.config.base import AXES, Settings, explain
from stability.config.groups import GROUPS, Group, parse_groups, share_groups
from stability.config.impl import Kernels, Use
from stability.registry import Registry, near_misses

_TRAINED = {"cross": False, "trainable": True}  # mechanisms allowed on a sweep's axis


class Part(Settings):
    """One named choice of a family, with its settings.

    Its JSON form is flat: ``{"name": "sc", "window": 2, …}``.
    """

    name: str = Field(description="the stem of the part's file")
    settings: SerializeAsAny[Settings] = Field(description="the part's own Config")
    groups: tuple[Group, ...] = Field(
        default=(), description="of an optimizer: what is different for the parameters of a role"
    )

    @model_serializer(mode="plain")
    def _flatten(self) -> dict[str, Any]:
        flat = {"name": self.name, **self.settings.model_dump(mode="json")}
        return flat | {GROUPS: {group.role: group.dump() for group in self.groups}} if self.groups else flat


def unusual_settings(item: Part) -> dict[str, Any]:
    """Return a part's settings that differ from their defaults, by key.

    Settings of nested parts have dotted keys, e.g. ``{"sc.rope": "absolute"}`` for a mix.
    """
    usual = type(item.settings).model_validate({})
    found: dict[str, Any] = {}
    for key in type(item.settings).model_fields:
        value, default = getattr(item.settings, key), getattr(usual, key)
        inner = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Part)]
        for held in inner:
            found |= {f"{held.name}.{name}": own for name, own in unusual_settings(held).items()}
        if isinstance(value, Part):
            found |= {key: value.name} if value.name != default.name else {}
        elif not inner and value != default:
            found[key] = value
    return found


def part(family: str, value: Any) -> Part:
    """Build a `Part` from ``{"name": …, **settings}`` or a bare name, validated by the part's Config.

    Raises:
        ValueError: a setting is invalid, or the mechanism is a cross mechanism (`cross_part` builds these).
    """
    if isinstance(value, Part):
        return value
    name, settings = split_part(family, value)
    if family == "mechanisms" and Registry(family).load(name, **_TRAINED).cross:
        raise ValueError(f"mechanism={name} is a cross mechanism, it needs a context: cross={name}")
    by_role = settings.pop(GROUPS, {}) if family == "optimizers" else {}
    own = validate_settings(family, name, settings)
    if not by_role:
        return Part(name=name, settings=own)
    return Part(name=name, settings=own, groups=parse_groups(Registry(family).load(name), name, own, by_role))


def split_part(family: str, value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or "name" not in value:
        choices = Registry(family).names(**(_TRAINED if family == "mechanisms" else {}))
        raise ValueError(f"{Registry(family).noun}: expected a name, got {value!r}; choices: {', '.join(choices)}")
    return value["name"], {key: item for key, item in value.items() if key != "name"}


def add_name(family: str, name: str, settings: Any) -> dict[str, Any]:
    """Return one part of an axis composed by Hydra: ``sc: {window: 2}`` → ``{"name": "sc", "window": 2}``.

    Args:
        family: the axis's family.
        name: name of the part.
        settings: its settings; None: the defaults.

    Raises:
        ValueError: the settings are no dict.
    """
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(
            f"{Registry(family).noun}.{name}={settings!r}: takes settings of {name}, not a value; e.g. "
            f"{Registry(family).noun}.{name}.SETTING=VALUE"
        )
    return {"name": name, **{str(key): item for key, item in (settings or {}).items()}}


def validate_settings(family: str, name: str, settings: dict[str, Any], *, path: str | None = None) -> Any:
    """Validate a part's settings by its Config.

    Args:
        family: family of the part.
        name: name of the part.
        settings: plain values by key.
        path: key of the settings on the command line; None: derived from family and name.

    Returns:
        The Config.

    Raises:
        ValueError: a setting is invalid, or unknown (with the nearest valid key); one line.
    """
    registry = Registry(family)
    config = registry.load(name).Config
    try:
        return config.model_validate(settings)
    except ValidationError as error:
        noun = registry.noun.removesuffix(" source")
        key = path or (f"{noun}.{name}" if family in AXES.values() else noun)
        raise ValueError(explain(error, config, key)) from None


@dataclass(frozen=True, slots=True)
class _PartsOf(BeforeValidator):
    """Validator of a field with parts; `stability.config.identity` reads its ``family`` as the field's marker."""

    family: str = ""


def one_part(family: str) -> Any:
    """Return the validator for a field with one part."""
    return _PartsOf(lambda value: part(family, value), family=family)


def some_parts(family: str) -> Any:
    """Return the validator for an axis of a sweep."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):  # an axis composed by Hydra: {"sa": {…}, "sc": {…}}
            value = [add_name(family, name, settings) for name, settings in list_axis_parts(family, value).items()]
        return require_agreement(family, tuple(part(family, item) for item in value))

    return _PartsOf(read, family=family)


def list_axis_parts(family: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an axis composed by Hydra, by name; optimizers include the shared groups."""
    return share_groups(value) if family == "optimizers" and GROUPS in value else value


def require_agreement(family: str, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the parts of an axis unchanged if they agree in their `Settings.same_for_all` fields.

    Runs of one sweep are compared, so these fields must have one value.

    Raises:
        ValueError: two parts differ in such a field.
    """
    seen: dict[str, tuple[str, Any]] = {}
    for item in parts:
        for field in item.settings.same_for_all:
            key, value = f"{Registry(family).noun}.{item.name}.{field}", getattr(item.settings, field)
            first, expected = seen.setdefault(field, (key, value))
            if value != expected:
                raise ValueError(
                    f"{first}={_format_value(expected)} and {key}={_format_value(value)}: "
                    "in one sweep they must be the same; set both, or sweep them apart"
                )
    return parts


def _format_value(value: Any) -> str:
    """Write a value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# run fields whose parts may have kernels, and the families of these parts
COMPUTED = {
    "mechanism": "mechanisms",
    "cross": "mechanisms",
    "residual": "residuals",
    "objective": "objectives",
    "optimizer": "optimizers",
}
OF_THE_MODEL = ("mechanism", "cross", "residual")
OF_THE_LOSS = (*OF_THE_MODEL, "objective")  # parts that compute the loss and its gradient


def computed_parts(run: Any) -> dict[str, Part | None]:
    """Return the run's parts with possible kernels, by field."""
    return {key: getattr(run, key) for key in COMPUTED}


def parts_of_model(run: Any) -> dict[str, Part | None]:
    """Return the subset of `computed_parts` used to build the model."""
    return {key: getattr(run, key) for key in OF_THE_MODEL}


def kernels_of(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the kernels requested by parts, with their settings as on the command line.

    An example of a setting is ``mechanism.sc.impl=triton``. ``parts`` is keyed by run field; fields outside `COMPUTED`
    are ignored.
    """
    return tuple(
        found.add_field(key, item.name)
        for key, family in COMPUTED.items()
        if (item := parts.get(key)) is not None
        for found in Registry(family).load(item.name).kernels(item.settings)
    )


def kernels_of_loss(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the subset of `kernels_of` used for the loss and its gradient."""
    return kernels_of({key: item for key, item in parts.items() if key in OF_THE_LOSS})


def use_of(recipe: Any) -> Use:
    """Return the properties of a run's or sweep's model that kernels depend on."""
    model, direction = recipe.model, Registry("objectives").load(recipe.objective.name).direction
    return Use(model.width, model.heads, direction, model.dropout_of("attention"))


class CrossOfEach(Settings):
    """The settings of ``cross=auto``: each mechanism is paired with the cross mechanism of its `cross_kind`."""

    parts: tuple[Part, ...] = Field(
        default=(), description="cross mechanisms with settings of their own; the others have their defaults"
    )

    def choose_for(self, mechanism: Part) -> Part:
        name = Registry("mechanisms").load(mechanism.name).cross_kind
        return next((item for item in self.parts if item.name == name), None) or cross_part(name)


def cross_part(name: str, settings: dict[str, Any] | None = None, *, path: str = "cross") -> Part:
    """Return the `Part` of a cross mechanism.

    Args:
        name: its name.
        settings: its settings; None: the defaults.
        path: key of the settings in error messages.

    Raises:
        ValueError: there is no such cross mechanism, or a setting is invalid.
    """
    registry = Registry("mechanisms")
    if name not in registry.names() or not registry.load(name).cross:
        raise ValueError(
            f"cross={name}: no such cross mechanism; {near_misses(name, ('auto', *registry.names(cross=True), 'none'))}"
        )
    return Part(name=name, settings=validate_settings("mechanisms", name, settings or {}, path=path))


def parse_cross(value: Any) -> Part | CrossOfEach | None:
    """Parse the value of ``cross=``; None for ``none``.

    Examples are ``ca``, ``{"name": "cc", "window": 4}`` and ``{"name": "auto", "cc": {"window": 4}}``.
    """
    if value is None or isinstance(value, Part | CrossOfEach):
        return value
    name, settings = split_part("mechanisms", value)
    if name == "none":
        return None
    if name != "auto":
        return cross_part(name, settings)
    return CrossOfEach(parts=tuple(_build_auto(key, item) for key, item in settings.items()))


def num_context_of(objective: Part) -> int:
    """Return the length J of an objective's context; 0 without one."""
    return Registry("objectives").load(objective.name).num_context(objective.settings)


def contexts_of(objective: Part) -> tuple[str, ...]:
    """Return the names of an objective's contexts that enter once before the blocks."""
    return Registry("objectives").load(objective.name).contexts_of(objective.settings)


def check_cross(cross: Part, num_positions: int, objective: Part, key: str) -> None:
    """Check a cross mechanism's settings against the number of positions and the context length.

    Args:
        cross: the cross mechanism.
        num_positions: sequence length N.
        objective: the objective; nothing is checked if it gives no context.
        key: prefix of the settings' keys in the message, e.g. ``cross.``.

    Raises:
        ValueError: the settings do not fit the lengths.
    """
    check_cross_lengths(
        cross, num_positions, num_positions if contexts_of(objective) else num_context_of(objective), key
    )


def check_cross_lengths(cross: Part, num_positions: int, num_context: int, key: str) -> None:
    """Check a cross mechanism's settings against a given context length.

    Args:
        cross: the cross mechanism.
        num_positions: sequence length N.
        num_context: context length J; nothing is checked if it is 0.
        key: prefix of the settings' keys in the message, e.g. ``cross.``.

    Raises:
        ValueError: the settings do not fit the lengths.
    """
    if not num_context:
        return
    try:
        Registry("mechanisms").load(cross.name).check_positions(cross.settings, num_positions, num_context)
    except ValueError as error:
        raise ValueError(str(error).replace("cross.", key)) from None


def _build_auto(name: str, settings: Any) -> Part:
    if not isinstance(settings, dict):
        raise ValueError(f"cross.{name}={settings!r}: takes settings of {name}, not a value")
    return cross_part(name, {key: item for key, item in settings.items() if key != "name"}, path=f"cross.{name}")
