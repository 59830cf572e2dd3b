"""Say what the parts of a run are computed by, and refuse what their kernels cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stability.config.curvature import CurvatureSpec
from stability.config.impl import AUTO, Kernels, Use
from stability.config.parts import Part
from stability.registry import Registry

DIFFERENTIATED_TWICE = ("sharpness", "density", "blocks")  # of `CurvatureSpec.measure`: Hessian-vector products
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


def require_second_derivatives(
    kernels: Iterable[Kernels], what: str, remedy: str, *, along_a_line: bool = False
) -> None:
    """Raise a ``ValueError`` of one line where one of the kernels that a loss is computed by has no second derivative.
    ``what``: what takes one; ``remedy``: what to write instead; ``along_a_line``: a rule of the kernels' own along a
    line (method taylor) is enough, where else autograd differentiates twice. What is not settled yet is passed by."""
    for asked in kernels:
        if asked.impl != AUTO and not (along_a_line and asked.second_order):
            which = "second derivatives by autograd" if asked.second_order else "second derivatives"
            raise ValueError(f"{what} takes {which}, and {asked.setting} has none; {remedy}")


def require_alpha_max(kernels: Iterable[Kernels], curvature: CurvatureSpec, what: str, remedy: str) -> None:
    """Raise a ``ValueError`` of one line where a measurement cannot go through the kernels that a loss is computed by.
    ``what``: who asks for it, e.g. ``hessian=true measures``; ``remedy``: as in `require_second_derivatives`."""
    listed = tuple(kernels)
    by_autograd = [name for name in curvature.measure if name in DIFFERENTIATED_TWICE]
    if curvature.method == "double_backward":
        require_second_derivatives(listed, f"{what} α_max, which by method=double_backward", remedy)
    if by_autograd:
        require_second_derivatives(listed, f"{what} {by_autograd[0]}, which", remedy)
    require_second_derivatives(listed, f"{what} α_max, which", remedy, along_a_line=True)


def check_of_loss(kernels: Iterable[Kernels], optimizer: Part, *, compiled: bool) -> None:
    """Raise a ``ValueError`` of one line where the kernels that a loss is computed by cannot be trained through.
    ``compiled``: whether torch.compile makes the training step's passes."""
    listed = tuple(kernels)
    if Registry("optimizers").load(optimizer.name).takes_hessian:
        remedy = "use another optimizer, or impl=reference"
        require_second_derivatives(listed, f"optimizer={optimizer.name}", remedy)
    if compiled and listed:
        raise ValueError(
            f"compile=true takes torch's own operations, and {listed[0].setting} has kernels; use compile=false, or "
            "impl=reference"
        )


def check_kernels(run: Any) -> None:
    """Raise a ``ValueError`` of one line where a run's parts ask for kernels together with what these cannot do."""
    parts = computed_parts(run)
    for asked in kernels_of(parts):
        asked.check(use_of(run))
    check_of_loss(kernels_of_loss(parts), run.optimizer, compiled=run.compile)


def use_of(recipe: Any) -> Use:
    """Return what the model of a run, or of a sweep's runs, uses its parts for."""
    model, direction = recipe.model, Registry("objectives").load(recipe.objective.name).direction
    return Use(model.width, model.heads, direction, model.dropout_of("attention"))
