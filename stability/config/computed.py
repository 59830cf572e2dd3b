"""Say what the parts of a run are computed by, and refuse what their kernels cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.config.impl import Kernels, Use
from stability.config.model import ModelSpec
from stability.config.parts import Part
from stability.registry import Registry

DIFFERENTIATED_TWICE = ("sharpness", "density", "blocks")  # of `CurvatureSpec.measure`: Hessian-vector products
Parts = Mapping[str, Part | None]
# the fields of a run whose parts may be computed by kernels, and the families of these
COMPUTED = {
    "mechanism": "mechanisms",
    "cross": "mechanisms",
    "residual": "residuals",
    "objective": "objectives",
    "optimizer": "optimizers",
}
OF_THE_LOSS = ("mechanism", "cross", "residual", "objective")  # what the loss and its gradient are computed by


def computed_parts(run: Any) -> dict[str, Part | None]:
    """Return what of a run's spec may be computed by kernels, by its fields."""
    return {key: getattr(run, key) for key in COMPUTED}


def kernels_of(parts: Mapping[str, Any]) -> tuple[Kernels, ...]:
    """Return the kernels that parts ask for, by the fields of a run that these stand in (those of `COMPUTED`, others
    are passed by), with their settings as the command line writes them, e.g. ``mechanism.sc.impl=triton``."""
    return tuple(
        found.written_behind(key, item.name)
        for key, family in COMPUTED.items()
        if (item := parts.get(key)) is not None
        for found in Registry(family).load(item.name).kernels(item.settings)
    )


def kernels_of_loss(parts: Parts) -> tuple[Kernels, ...]:
    """Return those of `kernels_of` that the loss and its gradient are computed by."""
    return kernels_of({key: item for key, item in parts.items() if key in OF_THE_LOSS})


def require_second_derivatives(parts: Parts, what: str, remedy: str, *, along_a_line: bool = False) -> None:
    """Raise a ``ValueError`` of one line where a loss is computed by kernels that have no second derivative. ``what``:
    what takes one; ``remedy``: what to write instead; ``along_a_line``: a rule of the kernels' own along a line (method
    taylor) is enough, where else autograd differentiates twice."""
    for asked in kernels_of_loss(parts):
        if not (along_a_line and asked.second_order):
            which = "second derivatives by autograd" if asked.second_order else "second derivatives"
            raise ValueError(f"{what} takes {which}, and {asked.setting} has none; {remedy}")


def require_alpha_max(parts: Parts, curvature: CurvatureSpec, what: str, remedy: str) -> None:
    """Raise a ``ValueError`` of one line where a measurement cannot go through the kernels that a loss is computed by.
    ``what``: who asks for it, e.g. ``hessian=true measures``; ``remedy``: as in `require_second_derivatives`."""
    by_autograd = [name for name in curvature.measure if name in DIFFERENTIATED_TWICE]
    if curvature.method == "double_backward":
        require_second_derivatives(parts, f"{what} α_max, which by method=double_backward", remedy)
    if by_autograd:
        require_second_derivatives(parts, f"{what} {by_autograd[0]}, which", remedy)
    require_second_derivatives(parts, f"{what} α_max, which", remedy, along_a_line=True)


def check_kernels(parts: Parts, model: ModelSpec, *, compiled: bool) -> None:
    """Raise a ``ValueError`` of one line where a run's parts ask for kernels together with settings that these do not
    compute. ``compiled``: whether torch.compile makes the training step's passes."""
    for asked in kernels_of(parts):
        asked.check(use_of(parts, model))
    if compiled and (asked := kernels_of_loss(parts)):
        raise ValueError(
            f"compile=true takes torch's own operations, and {asked[0].setting} has kernels; use compile=false, or "
            "impl=reference"
        )


def use_of(parts: Parts, model: ModelSpec) -> Use:
    """Return what a run's model uses its parts for."""
    objective = parts["objective"]
    assert objective is not None
    direction = Registry("objectives").load(objective.name).direction
    return Use(model.width, model.heads, direction, model.dropout_of("attention"))
