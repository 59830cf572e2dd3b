"""Another value for each field of a Config, for tests that show that every setting changes something."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from stability.config import Settings


def other_value(config: type[Settings], name: str) -> Any:
    """Return a value that the field ``name`` may have beside its default. Errors: ``LookupError`` where none can be
    found by the field's type; the test has to name one then."""
    field = config.model_fields[name]
    default = field.get_default(call_default_factory=True)
    for value in _candidates(field, default):
        if value != default and _is_taken(config, name, value):
            return value
    raise LookupError(f"{config.__qualname__}.{name}: give another value than {default!r}")


def _candidates(field: FieldInfo, default: Any) -> list[Any]:
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, float):
        return [default / 2, 0.5, 0.25, 2.0]
    if isinstance(default, int):
        return [default + 1, default + 2, default * 2]
    if isinstance(default, tuple) and len(default) > 1:
        return [default[:-1]]
    return [value for value in _choices(field.annotation) if value != default]


def _choices(annotation: Any) -> list[Any]:
    """Return the values of a ``Literal``, also of one that is optional; of an optional number a few."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    by_type: dict[Any, list[Any]] = {int: [2, 3], float: [0.5, 0.25, 2.0], NoneType: []}
    if annotation in by_type:
        return by_type[annotation]
    return [value for inner in get_args(annotation) for value in _choices(inner)]


def _is_taken(config: type[Settings], name: str, value: Any) -> bool:
    """Return whether the field itself takes the value, whatever the model says of several fields together."""
    try:
        config.__pydantic_validator__.validate_assignment(config.model_construct(), name, value)
    except ValueError as error:
        return not any(item["loc"][:1] == (name,) for item in getattr(error, "errors", list)())
    return True
