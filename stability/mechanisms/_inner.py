"""A mechanism that is made of others holds them as parts, each with its own settings, and tells their errors under its
own path."""

from __future__ import annotations

from typing import Any

from stability.config.parts import Part, part
from stability.mechanisms._base import AbstractMechanism
from stability.registry import Registry, near_misses


def load(name: str) -> type[AbstractMechanism]:
    """Return the class of a mechanism."""
    return Registry("mechanisms").load(name)


def inner_part(owner: str, name: str, settings: Any, choices: tuple[str, ...], own: tuple[str, ...]) -> Part:
    """Build a part of the mechanism ``owner`` from what was written under ``mechanism.owner.name``.

    ``choices``: what may be a part; ``own``: the owner's own settings, which a wrong name may have been meant to be.
    Errors: ``ValueError`` of one line under the owner's path.
    """
    if name not in choices:
        raise ValueError(f"mechanism.{owner}.{name}: unknown key; {near_misses(name, (*own, *choices))}")
    if not isinstance(settings, dict | None):
        raise ValueError(
            f"mechanism.{owner}.{name}={settings!r}: must hold settings of {name}, e.g. mechanism.{owner}.sc.window=4"
        )
    try:
        return part("mechanisms", {"name": name, **(settings or {})})
    except ValueError as error:
        raise ValueError(told(error, owner, name)) from None


def told(error: ValueError, owner: str, name: str) -> str:
    """Return a part's error under its owner's path."""
    return str(error).replace(f"mechanism.{name}", f"mechanism.{owner}.{name}")
