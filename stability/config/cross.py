"""Choose the cross mechanism of a recipe, one for each mechanism, and check the context that it needs."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stability.config.base import Settings
from stability.config.parts import Part, name_and_settings, settings_of
from stability.registry import Registry, near_misses


class CrossOfEach(Settings):
    """The settings of ``cross=auto``, by which beside each self mechanism stands the cross mechanism of its kind, which
    its class names."""

    parts: tuple[Part, ...] = Field(
        default=(), description="cross mechanisms with settings of their own; the others have their defaults"
    )

    def beside(self, mechanism: Part) -> Part:
        name = Registry("mechanisms").load(mechanism.name).cross_kind
        return next((item for item in self.parts if item.name == name), None) or cross_part(name)


def cross_part(name: str, settings: dict[str, Any] | None = None, *, path: str = "cross") -> Part:
    """Return the `Part` of a cross mechanism; errors name the setting under ``path``."""
    registry = Registry("mechanisms")
    if name not in registry.names() or not registry.load(name).cross:
        raise ValueError(
            f"cross={name}: no such cross mechanism; {near_misses(name, ('auto', *registry.names(cross=True), 'none'))}"
        )
    return Part(name=name, settings=settings_of("mechanisms", name, settings or {}, path=path))


def cross_choice(value: Any) -> Part | CrossOfEach | None:
    """Return what ``cross=`` holds: ``ca``, ``{"name": "cc", "window": 4}``; ``{"name": "auto", "cc": {"window": 4}}``;
    None for ``none``."""
    if value is None or isinstance(value, Part | CrossOfEach):
        return value
    name, settings = name_and_settings("mechanisms", value)
    if name == "none":
        return None
    if name != "auto":
        return cross_part(name, settings)
    return CrossOfEach(parts=tuple(_of_auto(key, item) for key, item in settings.items()))


def num_context_of(objective: Part) -> int:
    """Return the length J of the context that an objective gives; 0: none."""
    return Registry("objectives").load(objective.name).num_context(objective.settings)


def contexts_of(objective: Part) -> tuple[str, ...]:
    """Return the names of the contexts of an objective that enter once before the blocks."""
    return Registry("objectives").load(objective.name).contexts_of(objective.settings)


def cross_fits(cross: Part, num_positions: int, objective: Part, key: str) -> None:
    """Raise a ``ValueError`` where a cross mechanism's settings, written under ``key``, do not fit the lengths. Without
    a context there is none to fit."""
    lengths_fit(cross, num_positions, num_positions if contexts_of(objective) else num_context_of(objective), key)


def lengths_fit(cross: Part, num_positions: int, num_context: int, key: str) -> None:
    """Check as `cross_fits` does for a context of a given length."""
    if not num_context:
        return
    try:
        Registry("mechanisms").load(cross.name).check_positions(cross.settings, num_positions, num_context)
    except ValueError as error:
        raise ValueError(str(error).replace("cross.", key)) from None


def _of_auto(name: str, settings: Any) -> Part:
    if not isinstance(settings, dict):
        raise ValueError(f"cross.{name}={settings!r}: must hold settings of {name}")
    return cross_part(name, {key: item for key, item in settings.items() if key != "name"}, path=f"cross.{name}")
