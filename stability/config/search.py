"""Settings of a sweep's choice of runs: `search=optuna`, `search=asha` and `search=pbt`.

This module imports neither Optuna nor Ray.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stability.config.base import AXES, Settings, explain, list_parts
from stability.config.groups import GROUPS, expand_groups
from stability.registry import near_misses

NO_RECIPE = ("seed", "behaviour")  # numeric fields of a run that cannot be searched


class Dimension(Settings):
    """One searched numeric field, written ``search.space.PATH={low:…,high:…,log:true}``.

    Values are integers if the field is an integer.
    """

    path: str = Field(
        min_length=1,
        description="the field as it is written on the command line: lr_peak, steps, mechanism.sc.step_size, "
        "optimizer.adamw.beta2",
    )
    low: float = Field(description="smallest value")
    high: float = Field(description="largest value")
    log: bool = Field(default=False, description="whether the scale is logarithmic")

    @model_validator(mode="after")
    def _check_order(self) -> Dimension:
        if self.low >= self.high:
            raise ValueError(f"search.space.{self.path}: low={self.low:g} must be below high={self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"search.space.{self.path}: low={self.low:g} must be positive with log=true")
        return self

    @property
    def center(self) -> float:
        return math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2


def _parse_dimensions(value: Any) -> Any:
    """Parse Hydra's nested dict into the fields of each `Dimension`; null removes one."""
    if not isinstance(value, dict):  # Hydra composes {"mechanism": {"sc": {"step_size": {"low": …, "high": …}}}}
        return value
    found: list[dict[str, Any]] = []

    def walk(node: Any, path: str) -> None:
        """Add the ranges below a node to ``found``; ValueError for a setting without a range."""
        if node is None:
            return
        if not isinstance(node, dict):
            raise ValueError(
                f"search.space.{path}={node!r}: must be a range, in quotes for the shell: "
                f"'search.space.{path}={{low:1e-4,high:1e-1,log:true}}'"
            )
        if {"low", "high"} & node.keys():
            found.append({"path": path, **node})
            return
        for key, item in node.items():
            walk(item, f"{path}.{key}" if path else str(key))

    walk(value, "")
    return found


class SearchSpec(Settings):
    """The settings of `search=optuna`.

    A tree-structured Parzen estimator searches for the lowest validation NLL of each kind of run.
    """

    name: Literal["optuna"] = Field(description="how points are chosen")
    num: int = Field(default=40, ge=1, description="points of each kind of run, each with all seeds")
    startup: int = Field(default=10, ge=1, description="number of the first points, drawn at random")
    batch: int | None = Field(
        default=None,
        ge=1,
        description="points of each kind that are chosen at a time; null: as many as run side by side",
    )
    seed: int = Field(default=0, ge=0, description="seed of the draws; the same seed and batch choose the same points")
    space: Annotated[tuple[Dimension, ...], BeforeValidator(_parse_dimensions)] = Field(
        default={"lr_peak": {"low": 1e-4, "high": 1e-1, "log": True}},
        validate_default=True,
        min_length=1,
        description="fields that vary and their ranges",
    )

    @property
    def center_lr(self) -> float | None:
        """Geometric or arithmetic middle of the learning rate's range; None if it is not searched."""
        return next((dimension.center for dimension in self.space if dimension.path == "lr_peak"), None)


class AshaSpec(Settings):
    """The settings of `search=asha`: successive halving of a grid's learning rates at rungs, by validation NLL.

    Asynchronous: a run continues if it is among the best that reached the rung before it; no run waits. Ray Tune
    decides. Synchronous: all runs of a rung are awaited, and the best rates of each kind continue; on any launcher.
    """

    name: Literal["asha"] = Field(description="how points are chosen")
    reduction: int = Field(
        default=3, ge=2, description="at each rung one run in so many continues; also the ratio of successive rungs"
    )
    first_step: int | None = Field(
        default=None, ge=1, description="the first rung's step; null: so that there are up to two rungs before the end"
    )
    synchronous: bool | None = Field(
        default=None, description="whether a rung awaits all its runs; null: if launcher=serial or slurm"
    )

    @property
    def center_lr(self) -> None:
        """None: the sweep's own learning rates are used."""
        return

    def waits(self, launcher: str) -> bool:
        """Return whether a rung awaits all its runs."""
        return launcher in ("serial", "slurm") if self.synchronous is None else self.synchronous

    def rungs(self, steps: int, every_steps: int) -> tuple[int, ...]:
        """Return the rungs: the first times powers of the reduction, before the last step.

        The first is a validated step. Runs are compared at these steps.

        Raises:
            ValueError: no validation before the last step.
        """
        first = self.first_step or -(-steps // self.reduction**2)
        step, found = -(-first // every_steps) * every_steps, []
        while step < steps:
            found.append(step)
            step *= self.reduction
        if not found:
            key = "evaluation.every_steps" if first < steps else "search.first_step"
            raise ValueError(
                f"search=asha: no validation before the last of steps={steps}; give {key}={steps - 1} or less"
            )
        return tuple(found)


class PbtSpec(Settings):
    """The settings of `search=pbt`: population based training of the learning rate.

    The sweep's rates start a population. After each segment the worst members copy the weights and the rate of the
    best, and change the rate.
    """

    name: Literal["pbt"] = Field(description="how points are chosen")
    every_steps: int | None = Field(default=None, ge=1, description="steps of a segment; null: a tenth of steps")
    quantile: float = Field(
        default=0.25,
        gt=0,
        le=0.5,
        description="share of the population that copies a checkpoint, and share of the best that are copied",
    )
    factor: float = Field(default=1.25, gt=1, le=10, description="factor by which a copied rate is changed")
    resample: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="probability that a rate is drawn anew from the range of the first ones instead",
    )
    seed: int = Field(default=0, ge=0, description="seed of the draws")

    @property
    def center_lr(self) -> None:
        """None: the sweep's own learning rates start the population."""
        return

    def ends(self, steps: int) -> tuple[int, ...]:
        """Return the last step of each segment."""
        length = self.every_steps or -(-steps // 10)
        return (*range(length, steps, length), steps)


def convert_halving(values: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep's values with ``search=asha search.synchronous=true`` for its older words ``halving.…``.

    Raises:
        ValueError: another search is chosen, or only ``halving.first_step`` is given.
    """
    others = {key: value for key, value in values.items() if key != "halving"}
    given = {key: value for key, value in (values.get("halving") or {}).items() if value is not None}
    if not given:
        return others
    if "reduction" not in given:
        key, value = next(iter(given.items()))
        raise ValueError(f"halving.{key}={value} is search.{key} of search=asha, which is not chosen; add search=asha")
    if (search := others.get("search")) is not None and search != {"name": "none"}:
        raise ValueError(
            f"halving.reduction={given['reduction']} is search=asha search.reduction={given['reduction']} "
            "search.synchronous=true, and another search is chosen; choose one"
        )
    return others | {"search": {"name": "asha", **given, "synchronous": True}}


AnySearch = SearchSpec | AshaSpec | PbtSpec
KINDS: dict[str, type[AnySearch]] = {"optuna": SearchSpec, "asha": AshaSpec, "pbt": PbtSpec}


def parse_search(value: Any) -> Any:
    """Validate the plain values of a search by its name; None for ``search=none``.

    Raises:
        ValueError: the name is unknown or a setting is invalid.
    """
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if name == "none":
        if len(value) > 1:
            given = next(key for key in value if key != "name")
            raise ValueError(f"search.{given} belongs to a search; add search=optuna")
        return None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"search={name}: unknown search; {near_misses(str(name), tuple(KINDS))}")
    try:
        return KINDS[name].model_validate(value)
    except ValidationError as error:
        raise ValueError(explain(error, KINDS[name], "search")) from None


def has_field(path: str, recipe: Mapping[str, Any]) -> bool:
    """Return whether a run of this recipe (plain JSON) has the field's part.

    For example, sa has no mechanism.sc.window.
    """
    axis, *rest = path.split(".")
    return axis not in AXES or (bool(rest) and recipe[axis]["name"] == rest[0])


def read_number(path: str, recipe: Mapping[str, Any]) -> int | float:
    """Return the number at a path of a recipe.

    Raises:
        ValueError: the field does not exist or is no number; one line.
    """
    holder, key = _find_holder(path, copy.deepcopy(dict(recipe)))
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"search.space.{path}: is {'null' if value is None else repr(value)} in this sweep, and only numbers can "
            "be searched"
        )
    return value


def replace_numbers(recipe: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return a copy of the recipe with the given values at their paths."""
    result = copy.deepcopy(dict(recipe))
    for path, value in values.items():
        holder, key = _find_holder(path, result)
        holder[key] = value
    return result


def _find_holder(path: str, recipe: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the dict with a path's field, and the field's key."""
    *steps, key = path.split(".")
    held: Any = recipe
    for step in steps:
        if step == GROUPS and steps[0] == "optimizer":
            held |= expand_groups(held)  # in place: the caller changes a group's setting in this dict
        inner = {name: item for name, item in held.items() if isinstance(item, dict)} | list_parts(held)
        if held.get("name") == step:  # mechanism.sc: `held` is that part already
            continue
        if step not in inner:
            raise ValueError(f"search.space.{path}: {step} has no settings; {near_misses(step, tuple(inner))}")
        held = inner[step]
    known = tuple(name for name in held if name not in ("name", *(NO_RECIPE if held is recipe else ())))
    if key not in known:
        raise ValueError(f"search.space.{path}: unknown key; {near_misses(key, known)}")
    return held, key
