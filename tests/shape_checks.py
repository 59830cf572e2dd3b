"""Checks of types at run time: those of shapes, which bind a name for each axis in every call, for functions that name
one. The others are checked by beartype alone, for a tenth of the time."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping

_with_shapes = jaxtyping.jaxtyped


def names_shapes(hint: Any) -> bool:
    """Whether an annotation has an array's axes in it."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(names_shapes, hint if isinstance(hint, list) else typing.get_args(hint)))


def _is_plain(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    try:
        return not any(map(names_shapes, typing.get_type_hints(function, include_extras=True).values()))
    except Exception:  # noqa: BLE001 - a name that is defined later or never: jaxtyping leaves that argument out
        return False


def _of_types(function: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    typed, config = typechecker(function), jaxtyping.config
    if typed is function:  # nothing is annotated
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if config.jaxtyping_disable else typed)(*args, **kwargs)

    return called


def checked(*args: Any, typechecker: Callable[[Any], Any], **kwargs: Any) -> Any:
    """`jaxtyping.jaxtyped`, as the import hook of ``--jaxtyping-packages`` calls it."""
    if args or kwargs:
        return _with_shapes(*args, typechecker=typechecker, **kwargs)
    shaped = _with_shapes(typechecker=typechecker)
    return lambda each: _of_types(each, typechecker) if _is_plain(each) else shaped(each)


jaxtyping.jaxtyped = checked
