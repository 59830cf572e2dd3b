"""Frozen base class of all specs, and one-line messages for pydantic's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from stability.registry import near_misses

STUDY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$"  # a folder under runs/studies, a PDF under reports
# every JSON reader represents integers up to here exactly, and sizes made of a few of them fit 64 bits
LARGEST_INTEGER = 2**53
# The axes of a sweep and their families. An axis lists several parts, so settings carry the part's name
# (mechanism.sc.window).
AXES = {
    "mechanism": "mechanisms",
    "residual": "residuals",
    "optimizer": "optimizers",
    "norm": "norms",
    "parametrization": "parametrizations",
}
LONGEST_NAME = 40  # characters: a name is typed again for reports, and is part of file names and titles
NAME_IN_WORDS = "letters a to z, digits and . _ = + - only, the first of them a letter or a digit (no / and no space)"
LONGEST_INPUT = 80  # longest part of a wrong value that a message repeats, in characters


class Settings(BaseModel):
    """Base of every spec and every part's Config.

    Frozen; no unknown keys, no NaN, no integer beyond 2^53; tuples for lists.

    Attributes:
        same_for_all: fields that must be equal in all parts of a sweep's axis with such a field.
        written_flat: field whose keys are written beside this spec's keys, without the field's name, also in errors.
        inner_directions: of a mechanism made of others, whose settings are written by their names: those within it
            support one of these directions.
        inner_without: names of mechanisms that cannot be within it all the same.
        items_written_flat: field whose items are written in place of this spec, e.g. ``values`` for ``lr=[1e-4,1e-3]``.
    """

    same_for_all: ClassVar[tuple[str, ...]] = ()
    written_flat: ClassVar[str | None] = None
    items_written_flat: ClassVar[str | None] = None
    inner_directions: ClassVar[frozenset[str]] = frozenset()
    inner_without: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _check_integer_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise PydanticCustomError("countable", "Input should be at most 2^53 = 9,007,199,254,740,992 in size")
        return value


AnySettings = TypeVar("AnySettings", bound=Settings)


def validate(model: type[AnySettings], values: dict[str, Any], path: str = "") -> AnySettings:
    """Validate values and return the spec.

    Args:
        model: class of the spec.
        values: plain values by field.
        path: key of the spec on the command line; "" at the top.

    Raises:
        ValueError: a value is invalid; the message is `explain`'s.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, model, path)) from None


NUMBERS = (int, float, bool, float | None)


def check_numbers(model: type[Settings], values: Mapping[str, Any]) -> None:
    """Validate a spec's plain int, float and bool fields alone.

    This check precedes the validation of parts and needs no import of torch.

    Raises:
        ValueError: as in `validate`.
    """
    known = model.__pydantic_decorators__.field_validators.values()
    changed = {name for validator in known if validator.info.mode != "after" for name in validator.info.fields}
    fields: dict[str, Any] = {
        name: (field.annotation, copy(field))
        for name, field in model.model_fields.items()
        if name in values and name not in changed and field.annotation in NUMBERS
    }
    try:
        create_model(model.__name__, __base__=Settings, **fields).model_validate(
            {name: values[name] for name in fields}
        )
    except ValidationError as error:
        raise ValueError(explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Describe a pydantic error in one line, two if there are several: field, value, rule, nearest valid choice.

    Args:
        error: pydantic's error.
        model: class of the spec.
        prefix: key of the spec on the command line; "" at the top.
    """
    lines = [_explain_one(item, model, prefix) for item in _first_causes(error.errors())]
    more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
    return "\n".join(lines[:2]) + more


def _first_causes(items: Sequence[Any]) -> list[Any]:
    """Return the errors without "too short" for a field with invalid items: pydantic counts only valid ones."""

    def follows(item: Any) -> bool:
        loc = item["loc"]
        return item["type"] == "too_short" and any(
            len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in items
        )

    return [item for item in items if not follows(item)]


def _explain_one(item: Any, model: type[BaseModel], prefix: str) -> str:
    """Describe one pydantic error in a line, under its path on the command line."""
    steps = [str(step) for step in item["loc"]]
    if issubclass(model, Settings) and steps[:1] == [model.written_flat] and len(steps) > 1:
        del steps[0]
    if _is_item_written_flat(model, item["loc"]):
        del steps[-2:]
    path = ".".join([prefix, *steps] if prefix else steps)
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        known = tuple(_find_model(model, item["loc"][:-1]).model_fields)
        return f"{path}: unknown key; {near_misses(str(item['loc'][-1]), known)}"
    if item["type"] == "missing":
        return describe_missing(path, model, item["loc"])
    if item["type"] == "tuple_type":
        return f"{path}={item['input']}: must be a list, written in brackets, e.g. {path}=[{item['input']}]"
    if item["type"] == "too_short":
        return f"{path}={[*item['input']]}: must list at least {item['ctx']['min_length']}"
    if item["type"] == "literal_error" and isinstance(item["loc"][-1], int):  # an item of a list of words
        path = path.rpartition(".")[0]
    given = "null" if item["input"] is None else repr(item["input"])
    short = given if len(given) <= LONGEST_INPUT else f"{given[:LONGEST_INPUT]}…"
    if item["type"] in ("model_type", "dict_type"):
        return f"{path}={short}: takes settings, not a value; write {path}.SETTING=VALUE"
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] == STUDY_NAME:
        return f"{path}={short}: a name consists of {NAME_IN_WORDS}"
    if item["type"] == "string_too_long":
        return f"{path}={short}: has {len(item['input'])} characters, at most {item['ctx']['max_length']} are possible"
    return f"{path}={short}: {item['msg'][0].lower()}{item['msg'][1:]}"


def describe_missing(path: str, model: type[BaseModel], loc: Sequence[Any]) -> str:
    """Describe a missing value in one line, with the spec's choices if any.

    Args:
        path: the key on the command line.
        model: the spec.
        loc: the field's location in the spec.
    """
    field = _find_model(model, tuple(loc[:-1])).model_fields.get(str(loc[-1]))
    choices = choices_of(field) if field else ()
    listing = f"; choices: {', '.join(map(str, choices))}" if choices else ""
    return f"{path}: a value is missing; give {path}=…{listing}"


def choices_of(field: FieldInfo) -> tuple[Any, ...]:
    """Return the choices of a Literal field; () for any other field."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def check_heads(heads: int, width: int, at: str) -> None:
    """Refuse a number of heads unless it splits the width into even head widths.

    RoPE rotates pairs of coordinates, hence even widths.

    Args:
        heads: number of heads H.
        width: model width d.
        at: prefix of the two keys in the message, e.g. ``model.``.

    Raises:
        ValueError: one line with the valid numbers of heads.
    """
    if width % heads or width // heads % 2:
        valid = [number for number in range(1, width + 1) if width % number == 0 and width // number % 2 == 0]
        remedy = f"valid: {valid}" if valid else f"{at}width must be even"
        raise ValueError(
            f"{at}heads={heads} must divide {at}width={width} into even head widths (RoPE turns pairs); {remedy}"
        )


def _is_item_written_flat(model: type[BaseModel], loc: tuple[Any, ...]) -> bool:
    """Return whether a location is an item of its spec's `items_written_flat` field."""
    holder = _find_model(model, loc[:-2])
    return len(loc) > 2 and issubclass(holder, Settings) and loc[-2] == holder.items_written_flat


def _find_model(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """Return the nested model at a location, or its deepest existing parent."""
    for step in loc:
        field = model.model_fields.get(str(step))
        for nested in (field.annotation, *get_args(field.annotation)) if field else ():  # X, or X | None
            if isinstance(nested, type) and issubclass(nested, BaseModel):
                model = nested
                break
    return model


def list_parts(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts listed by a pattern, by name: ``parts: [{name: sc, window: 2}]`` → ``{"sc": {…}}``.

    The values are the original dicts, not copies.
    """
    listed = [item for items in held.values() if isinstance(items, list) for item in items]
    return {item["name"]: item for item in listed if isinstance(item, dict) and "name" in item}
