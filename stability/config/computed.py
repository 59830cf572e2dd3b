"""Kernels requested by the parts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability.config.impl import Kernels, Use
from stability.config.parts import Part
from stability.registry import Registry

# run fields whose parts may have kernels, and the families of these parts
COMPUTED = {
    "mechanism": "mechanisms",
    "cross": "mechanisms",
    "residual": "residuals",
    "objective": "objectives",
    "optimizer": "optimizers",
}
OF_THE_MODEL = ("mechanism", "cross", "residual")
OF_THE_LOSS = (*OF_THE_MODEL, "objective")  # parts that compute the loss and its gradient


def computed_parts(run: Any) -> dict[str, Part | None]:
    """Return the run's parts with possible kernels, by field."""
    return {key: getattr(run, key) for key in COMPUTED}


def parts_of_model(run: Any) -> dict[str, Part | None]:
    """Return the subset of `computed_parts` used to build the model."""
    return {key: getattr(run, key) for key in OF_THE_MODEL}


def kernels_of(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the kernels requested by parts, with their settings as on the command line.

    An example of a setting is ``mechanism.sc.impl=triton``. ``parts`` is keyed by run field; fields outside `COMPUTED`
    are ignored.
    """
    return tuple(
        found.add_field(key, item.name)
        for key, family in COMPUTED.items()
        if (item := parts.get(key)) is not None
        for found in Registry(family).load(item.name).kernels(item.settings)
    )


def kernels_of_loss(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the subset of `kernels_of` used for the loss and its gradient."""
    return kernels_of({key: item for key, item in parts.items() if key in OF_THE_LOSS})


def use_of(recipe: Any) -> Use:
    """Return the properties of a run's or sweep's model that kernels depend on."""
    model, direction = recipe.model, Registry("objectives").load(recipe.objective.name).direction
    return Use(model.width, model.heads, direction, model.dropout_of("attention"))
