"""Read the settings of a part from its file's text, without importing it: nearly every part imports torch.

The fields of a part's Config are the only place that states its settings. This reader follows names and base classes
through this project's own imports and evaluates literals. A part with a field that needs more is imported instead.
"""

from __future__ import annotations

import ast
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Field

from stability.config.identity import Place
from stability.registry import Registry, describe_syntax_error, plugins_of

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


REQUIRED = "???"  # the default of a setting without one, as Hydra writes it
PACKAGE = "stability"
ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("stability.config.base", "Settings")  # base of every Config; it has no fields
PLAIN = {"int": int, "float": float, "bool": bool, "str": str}


class Setting(NamedTuple):
    """One setting as plain values.

    Attributes:
        default: its default, lists for tuples; `REQUIRED` without one.
        meaning: its description, behind the words that it may be: ``fixed | learned: …``.
        kind: the values that it takes.
    """

    default: Any
    meaning: str
    kind: Kind = Kind()


class Unreadable(LookupError):
    """An expression that only Python itself evaluates, or a name that is not of this project."""


class _Found(NamedTuple):
    """A class or an expression, and the module whose names it uses."""

    module: str
    node: Any


def read_settings(family: str, name: str, config: str = "Config") -> dict[str, Setting]:
    """Return the settings of a part by key, in their order.

    Args:
        family: the part's family.
        name: the part's name.
        config: name of the class with the fields, ``Config`` or an objective's ``Sampling``.
    """
    if name not in plugins_of(family):  # these are imported already
        try:
            return _read_settings(family, name, config)
        except Unreadable:
            pass
    fields = getattr(Registry(family).load(name), config).model_fields
    return {
        key: Setting(plain_default(field), meaning_of(field), kind_of(field.annotation, field.metadata))
        for key, field in fields.items()
    }


def read_attribute(family: str, name: str, key: str) -> Any:
    """Return an attribute of a part's class that is a literal, e.g. ``cross`` or ``Config.inner_without``.

    Args:
        family: the part's family, e.g. ``mechanisms``.
        name: the part.
        key: dotted path from the class to the attribute.
    """
    if name not in plugins_of(family):
        try:
            return _read_attribute(family, name, key)
        except Unreadable:
            pass
    return attrgetter(key)(Registry(family).load(name))


def plain_default(field: Any) -> Any:
    """Return the default of a pydantic field as a plain value."""
    return REQUIRED if field.is_required() else make_plain(field.get_default(call_default_factory=True))


def meaning_of(field: Any) -> str:
    """Return a pydantic field's description, behind the words that the field may be."""
    return _prefix_words(_words_of_type(field.annotation), field.description or "")


def _prefix_words(words: tuple[Any, ...], meaning: str) -> str:
    return ": ".join(filter(None, [" | ".join(map(str, words)), meaning]))


def _words_of_type(annotation: Any) -> tuple[Any, ...]:
    """Return the words of a ``Literal``, also within a tuple or beside None."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((words for inner in get_args(annotation) if (words := _words_of_type(inner))), ())


def make_plain(value: Any) -> Any:
    """Return a value with lists for tuples and dicts for specs."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [make_plain(item) for item in value] if isinstance(value, tuple | list) else value


@cache
def _read_settings(family: str, name: str, config: str) -> dict[str, Setting]:
    return _fields(_find_member(_find_export(family, name), config))


@cache
def _read_attribute(family: str, name: str, key: str) -> Any:
    return _value(*reduce(_find_member, key.split("."), _find_export(family, name)))


def _find_export(family: str, name: str) -> _Found:
    return _resolve(f"{PACKAGE}.{family}.{name}", ast.Name("EXPORT"))


@cache
def _names(module: str) -> dict[str, Any]:
    """Return a module's classes and values by name; an imported one as (module, name)."""
    path = ROOT.parent.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        raise Unreadable(module)
    names: dict[str, Any] = {}
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise ValueError(describe_syntax_error(error)) from None
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == PACKAGE:
            names |= {alias.asname or alias.name: (statement.module, alias.name) for alias in statement.names}
        else:
            names |= _list_assigned(statement)
    return names


def _list_assigned(statement: ast.stmt) -> dict[str, Any]:
    """Return the class or value that a statement names."""
    match statement:
        case ast.ClassDef(name=name):
            return {name: statement}
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            return {ast.unparse(name): value for name, value in zip(names, values, strict=False)}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return {name: value}
    return {}


def _resolve(module: str, node: Any) -> _Found:
    """Follow a name to its class or value."""
    match node:
        case ast.Name(id=name):
            found = _names(module).get(name)
            if found is None:
                raise Unreadable(f"{module}: {name}")
            return _resolve(found[0], ast.Name(found[1])) if isinstance(found, tuple) else _resolve(module, found)
        case ast.Attribute(value=owner, attr=name):
            return _find_member(_resolve(module, owner), name)
    return _Found(module, node)


def _find_member(owner: _Found, name: str) -> _Found:
    """Return a class attribute, inherited ones included."""
    if isinstance(owner.node, ast.ClassDef):
        own = [held[name] for statement in owner.node.body if name in (held := _list_assigned(statement))]
        if own:
            return _resolve(owner.module, own[-1])
        for base in owner.node.bases:
            try:
                return _find_member(_resolve(owner.module, base), name)
            except Unreadable:  # e.g. nn.Module
                continue
    raise Unreadable(name)


def _fields(config: _Found) -> dict[str, Setting]:
    """Return the fields of a Config in pydantic's order: those of its bases first."""
    if not isinstance(config.node, ast.ClassDef):
        raise Unreadable(config.module)
    if (config.module, config.node.name) == SETTINGS:
        return {}
    fields: dict[str, Setting] = {}
    for base in reversed(config.node.bases):
        fields |= _fields(_resolve(config.module, base))
    for statement in config.node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=key)) if "ClassVar" not in ast.unparse(statement.annotation):
                fields[key] = _setting(config.module, statement)
    return fields


def _setting(module: str, statement: ast.AnnAssign) -> Setting:
    """Return the setting of ``key: annotation = value``, where value is ``Field(…)``, a default or nothing."""
    value, told = statement.value, _fields_call(statement.value)
    if "default_factory" in told:
        raise Unreadable(module)
    default = told.get("default") if told else value
    meaning = told.get("description")
    text = _meaning_of_type(module, statement.annotation) if meaning is None else _value(module, meaning)
    return Setting(
        REQUIRED if default is None else make_plain(_value(module, default)),
        _prefix_words(_words(module, statement.annotation), text),
        kind_of(_type(module, statement.annotation), [_bounds(module, told)]),
    )


def _type(module: str, annotation: Any) -> Any:
    """Return the type that an annotation names, with its bounds; Any for a class of ours."""
    match annotation:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name]
        case ast.Name() | ast.Attribute():
            try:
                found = _resolve(module, annotation)
            except Unreadable:  # e.g. Any
                return Any
            return Any if isinstance(found.node, ast.ClassDef) else _type(*found)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return Literal[_words(module, annotation)]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *markers])):
            places = [Place() for each in markers if ast.unparse(each).startswith("Place(")]
            bounds = [_bounds(module, _fields_call(each)) for each in markers]
            return Annotated[_type(module, inner), *places, *bounds]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[inner, *_])):
            return tuple[_type(module, inner), ...]
        case ast.BinOp(left=left, right=right):
            return Union[_type(module, left), _type(module, right)]  # noqa: UP007
    return Any


def _bounds(module: str, told: dict[str, ast.expr]) -> Any:
    """Return a pydantic field with the bounds among the arguments of ``Field(…)``."""
    return Field(**{key: _value(module, told[key]) for key in BOUNDS if key in told})


def _words(module: str, annotation: Any) -> tuple[Any, ...]:
    """Return the words of a ``Literal`` in an annotation."""
    match annotation:
        case ast.Name() | ast.Attribute():
            try:
                found = _resolve(module, annotation)
            except Unreadable:  # e.g. int
                return ()
            return () if isinstance(found.node, ast.ClassDef) else _words(*found)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=items):
            return tuple(_value(module, items)) if isinstance(items, ast.Tuple) else (_value(module, items),)
        case ast.Subscript(slice=ast.Tuple(elts=inner)):
            return next((words for each in inner if (words := _words(module, each))), ())
        case ast.Subscript(slice=inner):
            return _words(module, inner)
        case ast.BinOp(left=left, right=right):
            return _words(module, left) or _words(module, right)
    return ()


def _meaning_of_type(module: str, annotation: Any) -> str:
    """Return the description in an annotation ``Annotated[…, Field(description=…)]``."""
    match annotation:
        case ast.Name():
            try:
                return _meaning_of_type(*_resolve(module, annotation))
            except Unreadable:  # e.g. int
                return ""
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *markers])):
            own = [call["description"] for each in markers if "description" in (call := _fields_call(each))]
            return _value(module, own[0]) if own else _meaning_of_type(module, inner)
    return ""


def _fields_call(node: Any) -> dict[str, ast.expr]:
    """Return the arguments of ``Field(…)`` by name; empty for any other expression."""
    match node:
        case ast.Call(func=ast.Name(id="Field"), args=args, keywords=keywords):
            first = {"default": args[0]} if args else {}
            return {**first, **{each.arg: each.value for each in keywords if each.arg}}
    return {}


def _value(module: str, node: Any) -> Any:
    """Return the value of an expression made of literals and names."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(module, operand)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _value(module, base) ** _value(module, exponent)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(each for item in items for each in _items(module, item))
        case ast.Set(elts=items):
            return frozenset(_value(module, item) for item in items)
        case ast.Call(func=ast.Name(id="frozenset"), args=inner, keywords=[]):
            return frozenset(*(_value(module, each) for each in inner))
        case ast.Name() | ast.Attribute():
            found = _resolve(module, node)
            if not isinstance(found.node, ast.Name | ast.Attribute):
                return _value(*found)
    raise Unreadable(f"{module}: {ast.unparse(node)}")


def _items(module: str, node: ast.expr) -> tuple[Any, ...]:
    """Return the items that an element of a list adds: several for ``*names``."""
    return tuple(_value(module, node.value)) if isinstance(node, ast.Starred) else (_value(module, node),)
