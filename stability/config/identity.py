"""A run's id hashes the settings that determine its results; field markers exclude the others.

A field is part of the id by default. Markers are declared at the field, e.g. ``path: Annotated[str | None, Place()] =
None``:

- `Place`: a location. Never in an id; its text on the command line may contain any characters.
- `Fingerprinted`: replaced by the data's fingerprint.
- `Label`: a name in tables only.
- `Since`: newer than some existing runs. Its neutral value is left out, so their ids stay the same.
- `Bare`: a part or group with no settings left is written as its bare name.
- `Family`: the family of the field's part (added by `stability.config.parts.one_part`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from stability.registry import Registry

ID_DIGITS = 12
# Data source settings that were excluded from ids before markers existed. User plugins may still have them unmarked;
# this project's sources mark them (tests/identity).
UNMARKED = ("path", "tokenizer", "ranks", "keep", "annotations")


@dataclass(frozen=True)
class Place:
    """Marks a field with one or several paths, or with a possible path.

    Attributes:
        names: regular expression of values that are location-independent names, e.g. of a dataset on a hub. Such a
            value is part of the id.
    """

    names: str | None = None

    def is_part_of_an_id(self, value: Any) -> bool:
        return self.names is not None and isinstance(value, str) and re.fullmatch(self.names, value) is not None


@dataclass(frozen=True)
class Fingerprinted:
    """Marks a field replaced by ``data_fingerprint`` in the id. A part keeps its name and loses all settings."""


@dataclass(frozen=True)
class Label:
    """Marks a field with a display name for tables: renaming does not change the id."""


@dataclass(frozen=True)
class Since:
    """Marks a field newer than some existing runs.

    ``neutral`` describes the behaviour of those runs and must never change, even if the field's default does: else
    their ids would denote other runs.

    Attributes:
        neutral: value for the behaviour before the field existed; for a group of settings its reduced form, ``{}``.
        of: names of the parts that existed before the field, if others inherit their Config; empty: all parts.
    """

    neutral: Any
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bare:
    """Marks a part or group written as its bare name if no setting is left.

    Older files had only the name.
    """


@dataclass(frozen=True)
class Family:
    """Marks a field with one or more parts of this family, as ``{"name": …, **settings}``."""

    family: str


def run_id(spec: BaseModel) -> str:
    """Return the id of a run: the first 12 hex digits of the sha256 of its `essence`."""
    return hashlib.sha256(essence(spec).encode()).hexdigest()[:ID_DIGITS]


def tokenizer_id(spec: BaseModel) -> str:
    """Return the id of a structure tokenizer, computed as in `run_id`."""
    return run_id(spec)


def essence(spec: BaseModel) -> str:
    """Return the settings that are part of a run's id, as canonical JSON: sorted keys, no spaces."""
    return json.dumps(drop_excluded(spec.model_dump(mode="json"), type(spec)), sort_keys=True, separators=(",", ":"))


def is_same_run(on_disk: Mapping[str, Any], values: Mapping[str, Any], schema: type[BaseModel]) -> bool:
    """Return whether two specs of a kind describe the same run; either may lack newer fields.

    Args:
        on_disk: plain JSON values of one.
        values: plain JSON values of the other.
        schema: the class of both.
    """
    first, second = (drop_excluded(json.loads(json.dumps(each)), schema) for each in (on_disk, values))
    return first == second


def fill_newer_fields(
    values: Mapping[str, Any], schema: type[BaseModel] | None, part: str = "", family: str | None = None
) -> dict[str, Any]:
    """Return plain JSON values with the neutral value of every missing `Since` field.

    An older file keeps its meaning, whatever the defaults are today.

    Args:
        values: the spec's or the part's values.
        schema: class with their fields; None: unknown in this process, nothing is added.
        part: name of the part with these settings; "" if there is none.
        family: family of this part.
    """
    whole = dict(values)
    for key, field in ({} if schema is None else schema.model_fields).items():
        since = next(
            (marker for marker in field.metadata if isinstance(marker, Since) and (not marker.of or part in marker.of)),
            None,
        )
        if since is not None:
            whole.setdefault(key, since.neutral)
        if key in whole:
            own = family_of(field.metadata) or (family if key == "parts" else None)
            if own is not None and isinstance(whole[key], str) and Bare() in field.metadata:
                whole[key] = {"name": whole[key]}  # older files contain the name only
            whole[key] = _fill_nested(whole[key], field.annotation, own)
    return whole


def _fill_nested(value: Any, annotation: Any, family: str | None) -> Any:
    """Return a field's value with its nested parts and groups filled."""
    if isinstance(value, list | tuple) and family is not None:
        return [_fill_nested(item, annotation, family) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("name", "")
    if family is None or not name:
        return fill_newer_fields(value, group_of(annotation), name)
    return {
        "name": name,
        **fill_newer_fields(
            {key: item for key, item in value.items() if key != "name"}, _config(family, name), name, family
        ),
    }


def shorten_places(
    values: Mapping[str, Any], schema: type[BaseModel] | None, family: str | None = None
) -> dict[str, Any]:
    """Return a spec's plain JSON values, each path cut to its last part.

    They are then sent elsewhere.

    Args:
        values: the spec's.
        schema: class with their fields; None: unknown in this process.
        family: family of the part with these settings; None: not a part's settings.
    """
    shown: dict[str, Any] = {}
    for key, value in values.items():
        field = None if schema is None else schema.model_fields.get(key)
        markers = [] if field is None else field.metadata
        is_place = any(isinstance(marker, Place) and not marker.is_part_of_an_id(value) for marker in markers)
        own = family_of(markers) or (family if key == "parts" else None)
        if is_place or (family == "data" and key in UNMARKED):
            shown[key] = _last_part(value)
        else:
            shown[key] = _shorten_nested_places(value, None if field is None else field.annotation, own)
    return shown


def _shorten_nested_places(value: Any, annotation: Any, family: str | None) -> Any:
    if isinstance(value, list | tuple):
        return [_shorten_nested_places(item, annotation, family) for item in value]
    if not isinstance(value, dict):
        return value
    schema = group_of(annotation) if family is None else _config(family, value.get("name", ""))
    return shorten_places(value, schema, family)


def _last_part(value: Any) -> Any:
    """Return the last part of a path, or of each in a list; the prefixes ``ckpt:`` and ``hf:`` stay."""
    if isinstance(value, list | tuple):
        return [_last_part(item) for item in value]
    return re.sub(r"^((?:ckpt|hf):)?.*/(?=[^/])", r"\1", value, flags=re.DOTALL) if isinstance(value, str) else value


def drop_excluded(values: Mapping[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """Return a spec's plain JSON values without those excluded from its id.

    ``schema`` is the class with their fields; None: unknown in this process.
    """
    return _drop_excluded(values, schema)


def _drop_excluded(
    values: Mapping[str, Any], schema: type[BaseModel] | None, part: str = "", family: str | None = None
) -> dict[str, Any]:
    """Return the plain values in the id; ``part`` and ``family`` name the part with these settings."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = None if schema is None else schema.model_fields.get(key)
        markers = [] if field is None else field.metadata
        if _is_outside(markers, value) or (family == "data" and key in UNMARKED):
            continue
        # a user's pattern may leave `parts` unmarked: its items are of the pattern's own family
        own = family_of(markers) or (family if key == "parts" else None)
        inner = _drop_nested(value, None if field is None else field.annotation, own, markers)
        if not any(
            isinstance(marker, Since) and (not marker.of or part in marker.of) and inner == marker.neutral
            for marker in markers
        ):
            kept[key] = inner
    return kept


def _is_outside(markers: Sequence[Any], value: Any) -> bool:
    if any(isinstance(marker, Fingerprinted) for marker in markers):
        return not isinstance(value, dict)
    return any(
        isinstance(marker, Label) or (isinstance(marker, Place) and not marker.is_part_of_an_id(value))
        for marker in markers
    )


def _drop_nested(value: Any, annotation: Any, family: str | None, markers: Sequence[Any]) -> Any:
    """Return the value with its nested parts and groups reduced."""
    if isinstance(value, list) and family is not None:
        return [_drop_nested(item, annotation, family, markers) for item in value]
    if not isinstance(value, dict):
        return value
    if any(isinstance(marker, Fingerprinted) for marker in markers):
        return value.get("name", {})
    name = value.get("name", "")
    if family is not None and name:
        kept = {
            "name": name,
            **_drop_excluded(
                {key: item for key, item in value.items() if key != "name"}, _config(family, name), name, family
            ),
        }
    else:
        kept = _drop_excluded(value, group_of(annotation), name)
    return name if kept == {"name": name} and any(isinstance(marker, Bare) for marker in markers) else kept


def family_of(markers: Sequence[Any]) -> str | None:
    """Return the family of the part in a field, or None."""
    return next((marker.family for marker in markers if isinstance(getattr(marker, "family", None), str)), None)


def group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class of a field, ``X`` for ``X | None``; None if it contains no group."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for item in get_args(annotation) if (found := group_of(item)) is not None), None)


def _config(family: str, name: str) -> type[BaseModel] | None:
    """Return a part's Config; None for a part unknown to this process: its settings are then used unchanged."""
    registry = Registry(family)
    return registry.load(name).Config if name in registry.names() else None
