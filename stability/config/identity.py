"""A run's id is made of what the run is, not of what is only said of it: markers at the fields of a spec tell the two
apart.

A field enters an id unless it says otherwise where it is declared, e.g. ``path: Annotated[str | None, Place()] =
None``:

- `Place`: it says where something lies. Never in an id, and taken whole on the command line, whatever characters are in
  it.
- `Fingerprinted`: the fingerprint of the data stands for it.
- `Label`: tables name the run by it, nothing else.
- `Since`: it is younger than runs that exist; with its neutral value it is left out, so that they keep their ids.
- `Bare`: with all settings left out, the part or group in it is written as its bare name.
- `Family`: of which family the part in it is (`stability.config.parts.one_part` says so by itself).
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
# Settings of a data source that left the ids before a field could say so. A source of somebody's own may have them
# unmarked, so that this stays;
# a source of ours marks them (tests/identity).
UNMARKED = ("path", "tokenizer", "ranks", "keep", "annotations")


@dataclass(frozen=True)
class Place:
    """The mark of a field that holds a path (or a tuple of them), or something that may be one.

    ``names``: a regular expression of what is no path but a name that means the same everywhere, e.g. of a dataset on a
    hub: such a value is part of the id.
    """

    names: str | None = None

    def is_part_of_an_id(self, value: Any) -> bool:
        return self.names is not None and isinstance(value, str) and re.fullmatch(self.names, value) is not None


@dataclass(frozen=True)
class Fingerprinted:
    """The mark of a field for which ``data_fingerprint`` stands. Of a part its name stays, and all its settings go."""


@dataclass(frozen=True)
class Label:
    """The mark of a field that is what tables call something: the same thing under another name is the same thing."""


@dataclass(frozen=True)
class Since:
    """The mark of a field that is younger than runs that exist; ``neutral`` is the value by which it does what they did
    without it.

    It says what runs of that time did, and is never changed, whatever becomes of the field's default: else their ids
    would stand for other runs. Of a group of settings it is what is left of it, ``{}``. ``of``: the parts, by name,
    whose runs are older than the field, where a Config is inherited by others that had it from their first run on;
    empty: whatever it stands in.
    """

    neutral: Any
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bare:
    """The mark of a field whose part or group is written as its bare name where all its settings are left out, as it
    was when there was a name only."""


@dataclass(frozen=True)
class Family:
    """The mark of a field that holds a part (or a tuple of parts) of this family, as ``{"name": …, **settings}``."""

    family: str


def run_id(spec: BaseModel) -> str:
    """Return the id of a run: the first 12 hex digits of the sha256 of its `essence`."""
    return hashlib.sha256(essence(spec).encode()).hexdigest()[:ID_DIGITS]


def tokenizer_id(spec: BaseModel) -> str:
    """Return the id of a structure tokenizer, made as `run_id` makes a run's."""
    return run_id(spec)


def essence(spec: BaseModel) -> str:
    """Return what decides how a run turns out, as canonical JSON: sorted keys, no spaces, nothing that is marked as
    being outside of its id."""
    return json.dumps(reduced(spec.model_dump(mode="json"), type(spec)), sort_keys=True, separators=(",", ":"))


def same_run(on_disk: Mapping[str, Any], values: Mapping[str, Any], schema: type[BaseModel]) -> bool:
    """Return whether two specs of a kind, as plain JSON values, are of one run. One of them may be older than some of
    its fields."""
    first, second = (reduced(json.loads(json.dumps(each)), schema) for each in (on_disk, values))
    return first == second


def filled(
    values: Mapping[str, Any], schema: type[BaseModel] | None, part: str = "", family: str | None = None
) -> dict[str, Any]:
    """Return a spec's plain JSON values with the neutral value of every `Since` field that is not there: what an older
    file means, whatever defaults are today.

    ``schema``: the class that declares them; None: nobody here knows, and nothing is added. ``part``, ``family``: whose
    settings these are.
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
                whole[key] = {"name": whole[key]}  # of the time when there was a name only
            whole[key] = _filled_inside(whole[key], field.annotation, own)
    return whole


def _filled_inside(value: Any, annotation: Any, family: str | None) -> Any:
    """Return a field's value with the parts or the group that it holds filled in their turn."""
    if isinstance(value, list | tuple) and family is not None:
        return [_filled_inside(item, annotation, family) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("name", "")
    if family is None or not name:
        return filled(value, group_of(annotation), name)
    return {
        "name": name,
        **filled({key: item for key, item in value.items() if key != "name"}, _config(family, name), name, family),
    }


def without_places(
    values: Mapping[str, Any], schema: type[BaseModel] | None, family: str | None = None
) -> dict[str, Any]:
    """Return a spec's plain JSON values with each path cut to its last part, to be sent elsewhere.

    Args:
        values: the spec's.
        schema: the class that declares them; None: unknown here.
        family: the family of the part whose settings these are, if they are a part's.
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
            shown[key] = _without_places_inside(value, None if field is None else field.annotation, own)
    return shown


def _without_places_inside(value: Any, annotation: Any, family: str | None) -> Any:
    if isinstance(value, list | tuple):
        return [_without_places_inside(item, annotation, family) for item in value]
    if not isinstance(value, dict):
        return value
    schema = group_of(annotation) if family is None else _config(family, value.get("name", ""))
    return without_places(value, schema, family)


def _last_part(value: Any) -> Any:
    """Return the last part of a path, or of each in a list; ``ckpt:`` and ``hf:`` stay before it."""
    if isinstance(value, list | tuple):
        return [_last_part(item) for item in value]
    return re.sub(r"^((?:ckpt|hf):)?.*/(?=[^/])", r"\1", value, flags=re.DOTALL) if isinstance(value, str) else value


def reduced(values: Mapping[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """Return a spec's plain JSON values less what is outside of its id. ``schema``: the class that declares them; None:
    nobody here knows."""
    return _reduced(values, schema)


def _reduced(
    values: Mapping[str, Any], schema: type[BaseModel] | None, part: str = "", family: str | None = None
) -> dict[str, Any]:
    """Return the plain values less what is outside of the id. ``part``, ``family``: whose settings these are."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = None if schema is None else schema.model_fields.get(key)
        markers = [] if field is None else field.metadata
        if _is_outside(markers, value) or (family == "data" and key in UNMARKED):
            continue
        # a pattern of somebody's own need not say that what it lists is of its own family
        own = family_of(markers) or (family if key == "parts" else None)
        inner = _inner(value, None if field is None else field.annotation, own, markers)
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


def _inner(value: Any, annotation: Any, family: str | None, markers: Sequence[Any]) -> Any:
    """Return the value with what it holds reduced in its turn."""
    if isinstance(value, list) and family is not None:
        return [_inner(item, annotation, family, markers) for item in value]
    if not isinstance(value, dict):
        return value
    if any(isinstance(marker, Fingerprinted) for marker in markers):
        return value.get("name", {})
    name = value.get("name", "")
    if family is not None and name:
        kept = {
            "name": name,
            **_reduced(
                {key: item for key, item in value.items() if key != "name"}, _config(family, name), name, family
            ),
        }
    else:
        kept = _reduced(value, group_of(annotation), name)
    return name if kept == {"name": name} and any(isinstance(marker, Bare) for marker in markers) else kept


def family_of(markers: Sequence[Any]) -> str | None:
    """Return the family of the part in a field; None where there is none."""
    return next((marker.family for marker in markers if isinstance(getattr(marker, "family", None), str)), None)


def group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the settings that a field holds, ``X`` of ``X | None``; None where it holds no group."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for item in get_args(annotation) if (found := group_of(item)) is not None), None)


def _config(family: str, name: str) -> type[BaseModel] | None:
    """Return a part's Config; None for a part that this process does not know: its settings are then taken as they
    are."""
    registry = Registry(family)
    return registry.load(name).Config if name in registry.names() else None
