"""Describe the values that a field takes: their type, bounds and choices, as JSON Schema names them."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from stability.config.identity import Place

# of a marker's attribute: the bound's name in JSON Schema
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "text"}


class Kind(NamedTuple):
    """The values of one field.

    Attributes:
        type: ``boolean``, ``integer``, ``number``, ``path``, ``text``, or ``any`` for all others.
        choices: the only words possible; () for any.
        bounds: bounds of a number, or of a list's items, by JSON Schema's name.
        is_list: whether it takes several in brackets.
        is_optional: whether it may be null.
    """

    type: str = "any"
    choices: tuple[Any, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    is_list: bool = False
    is_optional: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the description under JSON Schema's names."""
        inner: dict[str, Any] = {"type": self.type, **dict(self.bounds)}
        if self.choices:
            inner["enum"] = list(self.choices)
        found = {"type": "array", "items": inner} if self.is_list else inner
        return {**found, "nullable": True} if self.is_optional else found

    def __str__(self) -> str:
        """Return the description in words, e.g. ``integer ≥ 1, or null``."""
        bounds = "".join(f" {SIGNS[name]} {value:g}," for name, value in self.bounds).rstrip(",")
        return f"{'list of ' * self.is_list}{self.type}{bounds}{', or null' * self.is_optional}"


def kind_of(annotation: Any, metadata: Any = ()) -> Kind:
    """Return the values of a field.

    Args:
        annotation: its type.
        metadata: its markers, e.g. ``FieldInfo.metadata``.
    """
    found = _kind_of_type(annotation)
    for marker in metadata:
        for inner in getattr(marker, "metadata", ()):  # of Field(…) within Annotated
            found = _add_marker(found, inner)
        found = _add_marker(found, marker)
    return found


def _kind_of_type(annotation: Any) -> Kind:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(args[0], args[1:])
    if origin is Literal:
        return Kind("boolean" if all(type(word) is bool for word in args) else "text", args)
    if origin is tuple:
        return kind_of(args[0])._replace(is_list=True, is_optional=False)
    if origin in (Union, UnionType):
        return _join([kind_of(each) for each in args if each is not type(None)], type(None) in args)
    return Kind(TYPES.get(annotation, "any"))


def _join(kinds: list[Kind], is_optional: bool) -> Kind:
    """Return the values of a union; numbers beside words are ``any``."""
    first = kinds[0]
    if len(kinds) > 1:
        types = {kind.type for kind in kinds}
        joined = "number" if types == {"integer", "number"} else first.type if len(types) == 1 else "any"
        words = [word for kind in kinds for word in kind.choices] if all(kind.choices for kind in kinds) else []
        first = Kind(joined, tuple(dict.fromkeys(words)), is_list=all(kind.is_list for kind in kinds))
    return first._replace(is_optional=is_optional or any(kind.is_optional for kind in kinds))


def _add_marker(kind: Kind, marker: Any) -> Kind:
    if isinstance(marker, Place):
        return kind._replace(type="path")
    found = [(name, getattr(marker, key)) for key, name in BOUNDS.items() if getattr(marker, key, None) is not None]
    known = dict(kind.bounds)
    return kind._replace(bounds=tuple({**known, **dict(found)}.items())) if found else kind
