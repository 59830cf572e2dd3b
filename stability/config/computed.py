"""Say what the parts of a run are computed by, and refuse what their kernels cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability.config.impl import Kernels, Use
from stability.config.parts import Part
from stability.registry import Registry

# the fields of a run whose parts may be computed by kernels, and the families of these
COMPUTED = {
    "mechanism": "mechanisms",
    "cross": "mechanisms",
    "residual": "residuals",
    "objective": "objectives",
    "optimizer": "optimizers",
}
OF_THE_MODEL = ("mechanism", "cross", "residual")
OF_THE_LOSS = (*OF_THE_MODEL, "objective")  # what the loss and its gradient are computed by


def computed_parts(run: Any) -> dict[str, Part | None]:
    """Return what of a run's spec may be computed by kernels, by its fields."""
    return {key: getattr(run, key) for key in COMPUTED}


def parts_of_model(run: Any) -> dict[str, Part | None]:
    """Return those of `computed_parts` that a model is built of."""
    return {key: getattr(run, key) for key in OF_THE_MODEL}


def kernels_of(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the kernels that parts ask for, by the fields of a run that these stand in (those of `COMPUTED`, others
    are passed by), with their settings as the command line writes them, e.g. ``mechanism.sc.impl=triton``."""
    return tuple(
        found.written_behind(key, item.name)
        for key, family in COMPUTED.items()
        if (item := parts.get(key)) is not None
        for found in Registry(family).load(item.name).kernels(item.settings)
    )


def kernels_of_loss(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return those of `kernels_of` that the loss and its gradient are computed by."""
    return kernels_of({key: item for key, item in parts.items() if key in OF_THE_LOSS})


def use_of(recipe: Any) -> Use:
    """Return what the model of a run, or of a sweep's runs, uses its parts for."""
    model, direction = recipe.model, Registry("objectives").load(recipe.objective.name).direction
    return Use(model.width, model.heads, direction, model.dropout_of("attention"))
