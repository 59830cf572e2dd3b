"""Choose the cross mechanism for each mechanism of a recipe, and check its context."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stability.config.base import Settings
from stability.config.parts import Part, split_part, validate_settings
from stability.registry import Registry, near_misses


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
