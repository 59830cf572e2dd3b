"""List every key of a command with its default and its meaning: for ``-h``, and for the documentation's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stability.cli.conf import (
    FAMILY_OF,
    choices,
    declared_choices,
    defaults,
    flatten,
    keys_of,
    preset_values,
    spec_values,
)
from stability.cli.declared import REQUIRED, Kind, kind_of, meaning_of, read_attribute, read_settings
from stability.cli.words import OF_EVERY_MODEL, SHORT
from stability.config.ablation import Ablation, exact_text
from stability.config.base import AXES, Settings
from stability.config.groups import GROUPS, Group
from stability.config.identity import family_of
from stability.config.parse import SPECS
from stability.config.parts import CrossOfEach, Part
from stability.config.scale import ScaleAxis
from stability.config.search import Dimension

# Classes with the user's own names in their keys: each key, and its fields.
WRITTEN: dict[type[BaseModel], dict[str, tuple[str, ...]]] = {
    Ablation: {"<part>.<setting>": ("part", "setting", "values")},
    CrossOfEach: {"<part>.<setting>": ("parts",)},
    Dimension: {"<field>": ("path",), "<field>.low": ("low",), "<field>.high": ("high",), "<field>.log": ("log",)},
    ScaleAxis: {"<field>": ("field", "values")},
    Group: {"<role>.lr_scale": ("role", "lr_scale"), "<role>.<setting>": ("role", "settings")},
}


class Row(NamedTuple):
    """One key.

    Attributes:
        key: as it is typed.
        default: as it is typed; ``""`` for a key with a name of the user's in it, ``(required)`` without a default.
        meaning: its description.
        needs: the choice with which it exists, e.g. ``search=asha``; ``""`` if it always does.
        kind: the values that it takes.
    """

    key: str
    default: str
    meaning: str
    needs: str = ""
    kind: Kind = Kind()


def command_rows(root: str) -> list[Row]:
    """Return the keys of a command: its groups of presets, then its fields."""
    schema, chosen = SPECS[root], defaults(root)
    presets = [group for group in chosen if "@" not in group and group not in schema.model_fields]
    rows = [Row(group, "null", "a preset: values of several keys") for group in presets]
    rows += [
        row if row.needs else row._replace(needs=_find_needed_choices(row.key, chosen))
        for row in _list_class_rows(schema)
    ]
    values = command_values(root)
    return [row._replace(default=_default_of_command(row, values, chosen)) for row in rows]


def command_values(root: str) -> dict[str, Any]:
    """Return the values that a command starts from: its own, and those of its choices outside of axes."""
    values: dict[str, Any] = {**spec_values(root), **preset_values("", root)}
    for group, choice in defaults(root).items():
        if group not in AXES and choice is not None and choice in choices(group):
            values[group] = {**values.get(group, {}), **preset_values(group, choice)}
    return values


def choice_rows(group: str, name: str) -> list[Row]:
    """Return the settings of one choice of a group, under the keys of a sweep.

    Args:
        group: the group, e.g. ``mechanism``.
        name: the choice, e.g. ``sc``.
    """
    needs = f"{group}=[{name}]" if group in AXES else f"{group}={name}"
    prefix = f"{group}.{name}." if group in AXES else f"{group}."
    if name in declared_choices(group) and group in FAMILY_OF:
        found = {} if name in ("auto", "none") and group == "cross" else read_settings(FAMILY_OF[group], name)
        of_inner = group == "mechanism" and bool(read_attribute("mechanisms", name, "Config.inner_directions"))
        rows = [
            Row(f"{prefix}{key}", _text(setting.default), setting.meaning, needs, setting.kind)
            for key, setting in found.items()
            if not (of_inner and key == "parts")
        ]
        inner = Row(f"{prefix}<part>.<setting>", "", "a setting of a mechanism within it", needs)
        return rows + [inner] * of_inner
    values = preset_values(group, name)
    known = {row.key: row for schema in SPECS.values() for row in _list_class_rows(schema)}
    return [
        known[f"{group}.{key}"]._replace(default=_text(value), needs=needs)
        for key, value in flatten(values)
        if f"{group}.{key}" in known
    ]


def _list_class_rows(schema: type[BaseModel], prefix: str = "", needs: str = "") -> Iterator[Row]:
    """Yield the keys of a class's fields as they are typed; of a union of classes those of all members."""
    for written, names in WRITTEN.get(schema, {}).items():
        fields = {name: schema.model_fields[name] for name in names}
        meanings = [f"<{name}>: " * (f"<{name}>" in written) + meaning_of(field) for name, field in fields.items()]
        default = "" if written.endswith(">") else _default(fields[names[-1]])
        last = fields[names[-1]]
        kind = Kind() if written.endswith(">") else kind_of(last.annotation, last.metadata)
        yield Row(f"{prefix}{written}", default, "; ".join(meanings), needs, kind)
    for name, field in {} if schema in WRITTEN else schema.model_fields.items():
        if issubclass(schema, Settings) and name == schema.written_flat:
            yield from _flat_rows(field, prefix, needs)
        else:
            yield from _list_field_rows(name, field, prefix, needs)


def _flat_rows(field: FieldInfo, prefix: str, needs: str) -> Iterator[Row]:
    """Yield the rows of a field whose keys are written without its name."""
    if classes := list(_classes(field.annotation)):
        yield from _list_class_rows(classes[0], prefix, needs)
        return
    for name in declared_choices("objective"):
        for key, setting in read_settings("objectives", name, "Sampling").items():
            yield Row(f"{prefix}{key}", _text(setting.default), setting.meaning, needs, setting.kind)


def _list_field_rows(name: str, field: FieldInfo, prefix: str, needs: str) -> Iterator[Row]:
    """Yield the rows of one field."""
    classes, key = list(_classes(field.annotation)), f"{prefix}{name}"
    if Part in classes:
        yield from _list_part_rows(name, field, prefix, needs)
    elif len(classes) > 1:  # a union, whose members have names
        names = {each: get_args(each.model_fields["name"].annotation)[0] for each in classes}
        yield Row(key, _default(field), meaning_of(field), needs)
        for each, choice in names.items():
            yield from (row for row in _list_class_rows(each, f"{key}.", f"{key}={choice}") if row.key != f"{key}.name")
    elif classes:
        if not prefix and (key in SHORT or choices(key)):
            yield Row(key, _default(field), meaning_of(field), needs)
        yield from _list_class_rows(classes[0], f"{key}.", needs)
    else:
        yield Row(key, _default(field), meaning_of(field) or name, needs, kind_of(field.annotation, field.metadata))


def _list_part_rows(name: str, field: FieldInfo, prefix: str, needs: str) -> Iterator[Row]:
    """Yield the rows of a field with parts: itself, and keys that several of its parts share."""
    yield Row(name, _default(field), meaning_of(field), needs)
    if CrossOfEach in _classes(field.annotation):
        yield from _list_class_rows(CrossOfEach, f"{name}.", f"{name}=auto")
    if family_of(field.metadata) == "optimizers":
        yield from _list_class_rows(Group, f"{name}.{GROUPS}.", needs)


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every class of settings that a field allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for item in get_args(annotation):
            yield from _classes(item)


def _find_needed_choices(key: str, chosen: Mapping[str, Any]) -> str:
    """Return the choices with a key that the command's own choice of its group lacks."""
    group, _, setting = key.partition(".")
    choice = chosen.get(group)
    if not setting or group in AXES or group not in chosen or key in OF_EVERY_MODEL:
        return ""
    head = setting.partition(".")[0]
    if choice is not None and head in keys_of(group, choice):
        return ""
    if head in choices(group):
        return f"{group}={head}"
    return " or ".join(f"{group}={name}" for name in choices(group) if head in keys_of(group, name))


def _default_of_command(row: Row, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Return a row's default, with the values of the command's yaml and of its own choices."""
    if row.key in chosen:
        return _text(chosen[row.key])
    value: Any = {} if row.needs else values
    for step in row.key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return row.default
        value = value[step]
    return row.default if isinstance(value, Mapping) else _text(value)


def _default(field: FieldInfo) -> str:
    value = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
    return "null" if isinstance(value, BaseModel | dict) else _text(value)


def _text(value: Any) -> str:
    return "(required)" if value == REQUIRED else exact_text(value) or '""'
