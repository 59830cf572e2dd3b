"""Vary one setting at a time around a base.

``ablate.sc.window=[2,4,8]`` gives the base and one variant for each other value. Settings of model, schedule and
objective vary in the same way (``ablate.model.logit_softcap=[30]``), and some fields by themselves
(``ablate.clip_norm=[null]``, ``ablate.optimizer=[stable_adamw]``, ``ablate.ffn=[moe]``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from stability.config.base import Settings, list_parts
from stability.config.groups import GROUPS, expand_groups
from stability.registry import near_misses

Build = Callable[[Any], Any]
OF_RECIPE = ("model", "schedule", "objective")  # groups of settings common to all runs
SINGLE = {"ffn": "ffns", "position": "positions"}  # a run's single parts, of which a sweep chooses one, by family
ALONE = ("optimizer", "norm", *SINGLE, "clip_norm", "batch")  # fields whose own values vary
SIZES = ("model.width", "model.layers")  # the ones with which heads, warm-up and parametrization change: see `scale`


class Variant(NamedTuple):
    """One value of an ablated setting.

    Attributes:
        value: the setting's value.
        label: label of the variant's runs, e.g. ``window=4``; "" for the base.
        part: the part, group or field with this value.
    """

    value: Any
    label: str
    part: Any


class Ablation(Settings):
    """The values of one setting of a part or of `OF_RECIPE`, or of one field of `ALONE`.

    Parts are `stability.config.parts.Part`.
    """

    part: str = Field(min_length=1, description="the part, e.g. sc, the group of settings, e.g. model, or the field")
    setting: str = Field(
        default="",
        description='the setting, dotted where it lies deeper: window, or sc.window of mix; "": the field itself',
    )
    values: tuple[Any, ...] = Field(
        min_length=1, description="the values that it takes; whether the base's own is among them does not matter"
    )

    @field_validator("values", mode="before")
    @classmethod
    def _make_hashable(cls, values: Any) -> Any:
        return (
            [tuple(value) if isinstance(value, list) else value for value in values]
            if isinstance(values, list | tuple)
            else values
        )

    @property
    def path(self) -> str:
        return ".".join(filter(None, ("ablate", self.part, self.setting)))

    def variants(self, axis: str, base: Any, build: Build) -> list[Variant]:
        """Return the base and one variant for each other value, in the given order.

        A base value missing from the list is inserted: in order among rising numbers, else first. A mechanism's labels
        have the form ``window=4``, others ``adamw.beta2=0.95``, ``model.logit_softcap=30`` or ``clip_norm=null``.

        Args:
            axis: the run's field that changes, e.g. ``mechanism``.
            base: its value.
            build: makes such a value from its flat dict; without a `setting`, from a listed value.

        Returns:
            The variants; the base has the label "".

        Raises:
            ValueError: the setting is unknown, a value is invalid or a value is listed twice; one line.
        """
        key = self.setting if axis == "mechanism" else self.path.removeprefix("ablate.")
        own = self._read_own(axis, base)
        found: list[Variant] = []
        for value in self.values:
            part = self._build_variant(axis, base, value, build)
            variant = Variant(value, "" if part == base else f"{key}={value_text(value)}", part)
            if any(part == other.part or variant.label == other.label for other in found):
                raise ValueError(
                    f"{self.path}={value_text(self.values)}: {value_text(value)} is listed twice; give each value once"
                )
            found.append(variant)
        if all(variant.label for variant in found):
            found.insert(_find_index(own, self.values), Variant(own, "", base))
        return found

    def _read_own(self, axis: str, base: Any) -> Any:
        """Return the base's own value of what varies."""
        if self.setting:
            return self._find_holder(axis, base.model_dump(mode="json"))[self._key]
        return getattr(base, "name", base)

    def _build_variant(self, axis: str, base: Any, value: Any, build: Build) -> Any:
        given = value
        if self.setting:
            given = base.model_dump(mode="json")
            self._find_holder(axis, given)[self._key] = value
        try:
            return build(given)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    @property
    def _key(self) -> str:
        return self.setting.rsplit(".", 1)[-1]

    def _find_holder(self, axis: str, flat: dict[str, Any]) -> dict[str, Any]:
        """Return the dict with the setting inside a part's flat dict."""
        held, path, steps = flat, f"ablate.{self.part}", self.setting.split(".")[:-1]
        if steps[:1] == [GROUPS] and axis == "optimizer":
            flat |= expand_groups(flat)
        for step in steps:
            inner = {key: item for key, item in held.items() if isinstance(item, dict)} | list_parts(held)
            if step not in inner:
                raise ValueError(
                    f"{path}.{step}: has no settings of its own"
                    + (f"; {near_misses(step, tuple(inner))}" if inner else "")
                )
            held, path = inner[step], f"{path}.{step}"
        if self._key not in _list_keys(held):
            raise ValueError(
                f"{path}.{self._key}: unknown key; {near_misses(self._key, _list_keys(held) + tuple(list_parts(held)))}"
            )
        return held


def _list_keys(held: dict[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in held if key != "name")


def _find_index(own: Any, values: Sequence[Any]) -> int:
    """Return the index of the base's value: in order if the values are rising numbers, else 0."""
    numbers = [value for value in (own, *values) if isinstance(value, int | float) and not isinstance(value, bool)]
    rising = len(numbers) == len(values) + 1 and list(values) == sorted(values)
    return sum(value < own for value in values) if rising else 0


def value_text(value: Any) -> str:
    """Write a value as labels and messages have it: 4, 0.1, true, null, [sa,sc]; a float with at most nine digits."""
    return _write(value, lambda number: f"{number:.9g}")


def exact_text(value: Any) -> str:
    """Write a value as a command line reads it, as the same value: a float with as many digits as that takes."""
    return _write(value, lambda number: short if float(short := f"{number:.9g}") == number else repr(number))


def _write(value: Any, write_float: Callable[[float], str]) -> str:
    if isinstance(value, tuple | list):
        return f"[{','.join(_write(item, write_float) for item in value)}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return write_float(value) if isinstance(value, float) else str(value)


def read(value: Any) -> Any:
    """Parse Hydra's nested dict ``{"sc": {"window": [2, 4]}}`` into the fields of each `Ablation`.

    Nested settings become dotted ones.
    """
    if not isinstance(value, dict):
        return value
    found: list[dict[str, Any]] = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        """Add the settings below a node to ``found``; ValueError if a leaf is not a list of values."""
        if isinstance(node, dict):
            for key, item in node.items():
                walk(item, (*path, str(key)))
        elif len(path) < 2 and "".join(path) not in ALONE:
            part, given = path[0] if path else "sc", value_text(node)
            raise ValueError(
                f"ablate{'.' * bool(path)}{'.'.join(path)}={given}: names no setting; e.g. "
                f"ablate.{part}.SETTING=[2,4,8]"
            )
        elif not isinstance(node, list | tuple) or not node:
            raise ValueError(
                f"{'.'.join(('ablate', *path))}={value_text(node)}: must be a list of one setting's values, e.g. "
                "ablate.sc.window=[2,4,8]"
            )
        elif (size := ".".join(path)) in SIZES:
            raise ValueError(f"ablate.{size}: a size has curves of its own; write {size}={value_text(node)}")
        else:
            found.append({"part": "".join(path[:1]), "setting": ".".join(path[1:]), "values": node})

    walk(value, ())
    return found
