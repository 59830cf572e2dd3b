"""The values that a setting may take beside its default, found from its field: a contract that every setting changes
something needs no list of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from stability.registry import Registry


def settings_of_family(family: str) -> list[tuple[str, str]]:
    """Every setting of every part of a family, as (part, setting)."""
    registry = Registry(family)
    return [(name, key) for name in registry.names() for key in registry.load(name).Config.model_fields]


def _is_valid(family: str, name: str, key: str, value: Any) -> bool:
    try:
        Registry(family).load(name).Config.model_validate({key: value})
    except ValueError:
        return False
    return True


def other_values(family: str, name: str, key: str) -> Iterator[Any]:
    """The other choices of a Literal, the other truth value, another number."""
    field = Registry(family).load(name).Config.model_fields[key]
    default, kinds = field.default, (field.annotation, *get_args(field.annotation))
    if get_origin(field.annotation) is Literal:
        yield from (choice for choice in get_args(field.annotation) if choice != default)
    elif bool in kinds:
        yield not default
    elif int in kinds:
        yield default - 1 if _is_valid(family, name, key, default - 1) else default + 1
    elif float in kinds:
        value = 0.75 if default is None else 0.5 * default + 0.1
        yield value if _is_valid(family, name, key, value) else default + 0.5
    else:
        raise AssertionError(f"{family}.{name}.{key}: a kind of setting that this test knows no other value of")
