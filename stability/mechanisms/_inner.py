"""Parts of composite mechanisms: own settings, and errors under the owner's path."""

from __future__ import annotations

from typing import Any

from stability.config import Settings
from stability.config.parts import Part, part
from stability.mechanisms._base import AbstractMechanism
from stability.registry import Registry, near_misses


def load(name: str) -> type[AbstractMechanism]:
    """Return a mechanism's class."""
    return Registry("mechanisms").load(name)


def inner_choices(owner: type[Settings]) -> tuple[str, ...]:
    """Return the names of the mechanisms that can be within one with this Config."""
    return tuple(
        name
        for name in Registry("mechanisms").names(cross=False)
        if name not in owner.inner_without and owner.inner_directions & load(name).directions
    )


def inner_part(owner: str, name: str, settings: Any, choices: tuple[str, ...], own: tuple[str, ...]) -> Part:
    """Build a part of the mechanism ``owner`` from settings under ``mechanism.owner.name``.

    Args:
        owner: name of the composite mechanism.
        name: name of the part.
        settings: the part's settings; None for defaults.
        choices: allowed parts.
        own: the owner's own settings, as suggestions for a misspelt ``name``.

    Raises:
        ValueError: unknown part or wrong settings; one line under the owner's path.
    """
    if name not in choices:
        raise ValueError(f"mechanism.{owner}.{name}: unknown key; {near_misses(name, (*own, *choices))}")
    if not isinstance(settings, dict | None):
        raise ValueError(
            f"mechanism.{owner}.{name}={settings!r}: takes settings of {name}, not a value; e.g. "
            f"mechanism.{owner}.sc.window=4"
        )
    try:
        return part("mechanisms", {"name": name, **(settings or {})})
    except ValueError as error:
        raise ValueError(prefix_error(error, owner, name)) from None


def prefix_error(error: ValueError, owner: str, name: str) -> str:
    """Return a part's error under its owner's path.

    Args:
        error: the part's error.
        owner: name of the composite mechanism.
        name: name of the part.
    """
    return str(error).replace(f"mechanism.{name}", f"mechanism.{owner}.{name}")
