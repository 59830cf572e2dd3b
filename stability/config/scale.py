"""Vary sizes: each value of ``model.width``, ``model.layers``, ``steps``, ``batch`` or ``vary.FIELD`` is a curve."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from stability.config.ablation import value_text
from stability.config.base import Settings
from stability.config.parts import Part, part

LISTED = ("model.width", "model.layers", "steps", "batch")  # fields that may be lists themselves
GROUPS = ("model", "schedule")  # all their settings may vary, except `FIXED`
FIELDS = ("steps", "batch", "clip_norm")
FIXED = ("model.name", "model.positions", "model.head_width")
OF_STEPS = ("schedule.warmup_steps", "evaluation.every_steps", "checkpoint.every_steps")  # grow with ``steps``
MOST_AXES = 2
BASES = {"base_width": "width", "base_depth": "layers"}  # settings of a parametrization → fields of the model
STANDARD = "standard"


class ScaleAxis(Settings):
    """The values of one field, each with runs of its own."""

    field: str = Field(min_length=1, description="the field, dotted where it lies deeper: model.width")
    values: tuple[Any, ...] = Field(min_length=1, description="its values; the first is the sweep's own")

    @field_validator("values")
    @classmethod
    def _check_values(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        texts = [value_text(value) for value in values]
        if repeated := [text for text in texts if texts.count(text) > 1]:
            raise ValueError(f"{repeated[0]} is listed twice; give each value once")
        return values

    @property
    def key(self) -> str:
        """Last part of the field: ``width``."""
        return self.field.rpartition(".")[2]


def read_axes(values: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep's plain values with every list of a size moved to ``vary``, its first value in its place.

    Args:
        values: as composed from the command line: ``{"model": {"width": [32, 64]}, "vary": {"schedule": {…}}}``.

    Raises:
        ValueError: a value of ``vary`` is no list of a field's values, a field is given twice or cannot vary; one line.
    """
    given = values.get("vary") or {}
    if not isinstance(given, dict):  # already read
        return values
    axes = dict(_walk(given, ()))
    found = {key: dict(item) if key in GROUPS and isinstance(item, dict) else item for key, item in values.items()}
    for field in LISTED:
        own = _get(found, field)
        if isinstance(own, list | tuple) and own:
            if field in axes:
                raise ValueError(f"{field} and vary.{field} both list its values; leave one of them out")
            axes[field] = list(own)
    check_fields(axes)
    for field, listed in axes.items():
        _set(found, field, listed[0])
    return found | {"vary": [{"field": field, "values": listed} for field, listed in axes.items()]}


def _walk(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted fields below a node with their values."""
    for key, item in node.items():
        place = (*path, str(key))
        if isinstance(item, dict):
            yield from _walk(item, place)
        elif isinstance(item, list | tuple) and item:
            yield ".".join(place), list(item)
        else:
            text = f"vary.{'.'.join(place)}={value_text(item)}"
            raise ValueError(f"{text}: must be a list of the field's values, e.g. vary.schedule.warmup_steps=[0,100]")


def _get(values: dict[str, Any], field: str) -> Any:
    group, _, key = field.rpartition(".")
    held = values.get(group, {}) if group else values
    return held.get(key) if isinstance(held, dict) else None


def _set(values: dict[str, Any], field: str, value: Any) -> None:
    group, _, key = field.rpartition(".")
    held = values.setdefault(group, {}) if group else values
    if isinstance(held, dict):
        held[key] = value


def check_fields(fields: Collection[str]) -> None:
    """Refuse fields that cannot vary, and more than `MOST_AXES` of them; ValueError with one line."""
    for field in fields:
        group, dot, _ = field.partition(".")
        is_known = group in GROUPS if dot else field in FIELDS
        if group.startswith("optimizer"):
            raise ValueError(
                f"vary.{field}: vary settings of an optimizer with ablate.NAME, e.g. ablate.adamw.beta2=[0.95,0.999]"
            )
        if not is_known or field in FIXED:
            of_parts = "; settings of parts with ablate.NAME, e.g. ablate.adamw.beta2=[0.95,0.999]"
            raise ValueError(
                f"vary.{field}: cannot vary within a sweep; fields that can: {', '.join(FIELDS)}, and the "
                f"settings of {' and '.join(GROUPS)} but for {', '.join(FIXED)}{of_parts * (group not in GROUPS)}"
            )
    if len(fields) > MOST_AXES:
        raise ValueError(
            f"{', '.join(fields)}: at most {MOST_AXES} fields may vary in a sweep; give the others one value"
        )


def list_sizes(recipe: Any, axes: tuple[ScaleAxis, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each combination of values as (label, changed fields of a run), e.g. ``"width=64"``.

    With other ``steps``, warm-up and cadences of validation and checkpoints keep their shares of them, unless they vary
    themselves.

    Args:
        recipe: the sweep; the first values are its own.
        axes: the varied fields. Without any, one combination without label and changes.
    """
    varied = {axis.field for axis in axes}
    for values in itertools.product(*(axis.values for axis in axes)):
        changes: dict[str, Any] = {axis.field: value for axis, value in zip(axes, values, strict=True)}
        if "steps" in changes and isinstance(changes["steps"], int):
            own = {field: _read(recipe, field) for field in OF_STEPS if field not in varied}
            share = changes["steps"] / recipe.steps
            changes |= {field: max(1, round(share * steps)) for field, steps in own.items() if steps}
        label = " ".join(f"{axis.key}={value_text(value)}" for axis, value in zip(axes, values, strict=True))
        yield label, _nest(recipe, changes)


def _read(recipe: Any, field: str) -> Any:
    for step in field.split("."):
        recipe = getattr(recipe, step)
    return recipe


def _nest(recipe: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return whole fields of a run for dotted changes; groups as plain dicts."""
    fields: dict[str, Any] = {}
    for field, value in changes.items():
        group, dot, key = field.partition(".")
        if dot:
            fields.setdefault(group, getattr(recipe, group).model_dump(mode="json"))[key] = value
        else:
            fields[field] = value
    return fields


def settle_base(parametrization: Part, model: Any, changed: Mapping[str, Any], smallest: Mapping[str, int]) -> Part:
    """Return a parametrization with its base sizes as numbers; at the base size the standard one, if it equals it.

    Args:
        parametrization: as given.
        model: the sweep's model.
        changed: changed fields of the run's model.
        smallest: the smallest value of each varied field.
    """
    settings, changes, is_base = parametrization.settings, {}, True
    for name, field in BASES.items():
        if name in type(settings).model_fields:
            own = getattr(model, field)
            base = getattr(settings, name) or smallest.get(f"model.{field}") or own
            changes[name], is_base = base, is_base and changed.get(field, own) == base
    if not changes:
        return parametrization
    if is_base and getattr(settings, "readout", None) != "zero":  # a head of zeros is none of the standard one
        return part("parametrizations", STANDARD)
    return parametrization.model_copy(update={"settings": settings.model_copy(update=changes)})


def require_base(parametrizations: Collection[Part], fields: Collection[str]) -> None:
    """Refuse a parametrization without a base size, given or the smallest of several; one line."""
    for each in parametrizations:
        own = {name: field for name, field in BASES.items() if name in type(each.settings).model_fields}
        if own and not any(getattr(each.settings, name) or f"model.{field}" in fields for name, field in own.items()):
            listed = " or ".join(f"model.{field}=[…]" for field in own.values())
            raise ValueError(
                f"parametrization={each.name} needs a base size: give several sizes, {listed}, of which the smallest "
                f"is the base, or parametrization.{each.name}.base_width=…"
            )
