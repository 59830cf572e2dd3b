"""Settings by which a sweep chooses its runs: what `search=optuna` varies, the rungs of `search=asha` and `halving`,
the segments of `search=pbt`. Neither Optuna nor Ray is imported in here."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stability.config.base import AXES, Settings, explain, parts_listed
from stability.config.groups import GROUPS, written_out
from stability.registry import near_misses

NO_RECIPE = ("seed", "behaviour")  # numbers of a run that are no choice of its recipe


class Dimension(Settings):
    """One numeric field, written ``search.space.PATH={low:…,high:…,log:true}``. It is an integer where the field of the
    recipe is one."""

    path: str = Field(
        min_length=1,
        description="the field as it is written on the command line: lr_peak, steps, mechanism.sc.step_size, "
        "optimizer.adamw.beta2",
    )
    low: float = Field(description="smallest value")
    high: float = Field(description="largest value")
    log: bool = Field(default=False, description="whether equal ratios count as equally far")

    @model_validator(mode="after")
    def _in_order(self) -> Dimension:
        if self.low >= self.high:
            raise ValueError(f"search.space.{self.path}: low={self.low:g} must be below high={self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"search.space.{self.path}: low={self.low:g} must be positive with log=true")
        return self

    @property
    def center(self) -> float:
        return math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2


def _dimensions(value: Any) -> Any:
    """Return the fields of each `Dimension` from what Hydra composes, ``{"mechanism": {"sc": {"step_size": {"low": …,
    "high": …}}}}``; null takes one away."""
    if not isinstance(value, dict):
        return value
    found: list[dict[str, Any]] = []

    def walk(node: Any, path: str) -> None:
        """Add the ranges below a node to ``found``; ``ValueError`` where a setting has no range."""
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
    """The settings of `search=optuna`: a tree-structured Parzen estimator looks for the lowest validation NLL of each
    kind of run."""

    name: Literal["optuna"] = Field(description="how points are chosen")
    num: int = Field(default=40, ge=1, description="points that are tried of each kind of run, each with all seeds")
    startup: int = Field(default=10, ge=1, description="of them the first, drawn at random")
    batch: int | None = Field(
        default=None, ge=1, description="points chosen at a time of each kind; null: as many as run side by side"
    )
    seed: int = Field(default=0, ge=0, description="seed of the draws; the same seed and batch choose the same points")
    space: Annotated[tuple[Dimension, ...], BeforeValidator(_dimensions)] = Field(
        min_length=1, description="fields that vary and their ranges"
    )

    @property
    def center_lr(self) -> float | None:
        """The middle of the learning rate's range; None where it does not vary."""
        return next((dimension.center for dimension in self.space if dimension.path == "lr_peak"), None)


class AshaSpec(Settings):
    """The settings of `search=asha`: asynchronous successive halving over a grid, by Ray Tune. At each rung a run goes
    on if its validation NLL is among the best of those that were there before it; nobody is waited for."""

    name: Literal["asha"] = Field(description="how points are chosen")
    reduction: int = Field(default=3, ge=2, description="at each rung one in so many goes on; the rungs' ratio, too")
    first_step: int | None = Field(
        default=None, ge=1, description="the first rung's step; null: so that there are up to two rungs before the end"
    )

    @property
    def center_lr(self) -> None:
        """The learning rates are the sweep's own."""
        return

    def rungs(self, steps: int, every_steps: int) -> tuple[int, ...]:
        """Return the steps at which runs are compared: the first, a validation's, times powers of the reduction, before
        the last. Errors: ``ValueError`` where there is none."""
        first = self.first_step or -(-steps // self.reduction**2)
        step, found = -(-first // every_steps) * every_steps, []
        while step < steps:
            found.append(step)
            step *= self.reduction
        if not found:
            raise ValueError(
                f"search=asha: no validation falls on a rung before steps={steps}; give evaluation.every_steps below "
                f"its {every_steps}"
            )
        return tuple(found)


class PbtSpec(Settings):
    """The settings of `search=pbt`: population based training of the learning rate. The rates of the sweep are a
    population's first ones; after each segment the worst take over the weights and the rate of the best, and change the
    rate."""

    name: Literal["pbt"] = Field(description="how points are chosen")
    every_steps: int | None = Field(default=None, ge=1, description="steps of a segment; null: a tenth of steps")
    quantile: float = Field(
        default=0.25, gt=0, le=0.5, description="share of a population that takes over, and of those it takes from"
    )
    factor: float = Field(default=1.25, gt=1, le=10, description="by which a rate that was taken over is changed")
    resample: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="probability that a rate is drawn anew from the first ones' range instead",
    )
    seed: int = Field(default=0, ge=0, description="seed of the draws")

    @property
    def center_lr(self) -> None:
        """The first learning rates are the sweep's own."""
        return

    def ends(self, steps: int) -> tuple[int, ...]:
        """Return the last step of each segment."""
        length = self.every_steps or -(-steps // 10)
        return (*range(length, steps, length), steps)


class HalvingSpec(Settings):
    """The settings of `halving.reduction=3` over a grid: at each rung, of the learning rates of each kind of run one in
    so many goes on, the best by validation NLL."""

    reduction: int = Field(
        ge=2,
        description="of a rung's learning rates one in so many goes on; the rungs lie so many times further apart each",
    )
    first_step: int | None = Field(
        default=None, ge=1, description="the first rung's step; null: so that there are up to two rungs before the end"
    )

    def rungs(self, steps: int, every_steps: int) -> tuple[int, ...]:
        """Return the steps at which runs are compared, each of them validated and before the last. ``ValueError`` where
        there is none."""
        step, found = self.first_step or -(-steps // self.reduction**2), []
        while (rung := -(-step // every_steps) * every_steps) < steps:
            found += [rung] if rung not in found else []
            step *= self.reduction
        if not found:
            raise ValueError(
                f"halving: no validation falls on a rung before steps={steps}; give evaluation.every_steps below its "
                f"{every_steps}"
            )
        return tuple(found)


def halving_asked_for(value: Any) -> Any:
    """Return the field as it is composed, or None for ``halving.reduction=null``. Errors: ``ValueError`` where another
    setting asks for one without it."""
    if not isinstance(value, dict) or value.get("reduction") is not None:
        return value
    if value.get("first_step") is not None:
        raise ValueError(
            f"halving.first_step={value['first_step']} is the first rung of halving.reduction=…, which is null; add "
            "halving.reduction=3"
        )
    return None


AnySearch = SearchSpec | AshaSpec | PbtSpec
KINDS: dict[str, type[AnySearch]] = {"optuna": SearchSpec, "asha": AshaSpec, "pbt": PbtSpec}


def chosen(value: Any) -> Any:
    """Return the search that a name stands for, from plain values. ``search=none`` is no search."""
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


def applies(path: str, recipe: Mapping[str, Any]) -> bool:
    """Return whether a run of this recipe (plain JSON) has the field's part: mechanism.sc.window means nothing to
    sa."""
    axis, *rest = path.split(".")
    return axis not in AXES or (bool(rest) and recipe[axis]["name"] == rest[0])


def current(path: str, recipe: Mapping[str, Any]) -> int | float:
    """Return what a recipe has at a path. Errors: ``ValueError`` of one line where there is no such field or no number
    in it."""
    holder, key = _holder(path, copy.deepcopy(dict(recipe)))
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"search.space.{path}: is {'null' if value is None else repr(value)} in this sweep, and only numbers can "
            "be searched"
        )
    return value


def changed(recipe: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return the recipe with other values at the paths."""
    result = copy.deepcopy(dict(recipe))
    for path, value in values.items():
        holder, key = _holder(path, result)
        holder[key] = value
    return result


def _holder(path: str, recipe: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the dict within a recipe that holds the field, and the field's key there; the groups of an optimizer are
    written out in the recipe where the field is among them."""
    *steps, key = path.split(".")
    held: Any = recipe
    for step in steps:
        if step == GROUPS and steps[0] == "optimizer":
            held |= written_out(held)
        inner = {name: item for name, item in held.items() if isinstance(item, dict)} | parts_listed(held)
        if held.get("name") == step:  # mechanism.sc: the part that stands under mechanism
            continue
        if step not in inner:
            raise ValueError(f"search.space.{path}: {step} holds no settings; {near_misses(step, tuple(inner))}")
        held = inner[step]
    known = tuple(name for name in held if name not in ("name", *(NO_RECIPE if held is recipe else ())))
    if key not in known:
        raise ValueError(f"search.space.{path}: unknown key; {near_misses(key, known)}")
    return held, key
