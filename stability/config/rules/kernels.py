"""Rules of kernels: requirements of a run and its measurements on the kernels of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stability.config.curvature import CurvatureSpec
from stability.config.impl import AUTO, Kernels
from stability.config.parts import CrossOfEach, Part, computed_parts, kernels_of, kernels_of_loss, use_of
from stability.registry import Registry

if TYPE_CHECKING:
    from stability.config.run import RunSpec
    from stability.config.sweep import SweepSpec

DIFFERENTIATED_TWICE = ("sharpness", "density", "blocks")  # `CurvatureSpec.measure` with Hessian-vector products


def kernels_compute_the_run(run: RunSpec) -> None:
    parts = computed_parts(run)
    for asked in kernels_of(parts):
        asked.check(use_of(run))
    require_trained_through(
        kernels_of_loss(parts), run.optimizer, compiled=run.compile, log_curvature=run.log.curvature
    )


def kernels_are_measured_through(sweep: SweepSpec) -> None:
    for _, choice in sweep.curves() if sweep.hessian else ():
        cross = sweep.cross.choose_for(choice["mechanism"]) if isinstance(sweep.cross, CrossOfEach) else sweep.cross
        asked = kernels_of_loss({**choice, "objective": sweep.objective, "cross": cross})
        require_alpha_max(asked, sweep.curvature, "hessian=true measures", "use hessian=false, or impl=reference")


def require_trained_through(
    kernels: Iterable[Kernels], optimizer: Part, *, compiled: bool, log_curvature: int | None = None
) -> None:
    """Refuse kernels of a loss that training cannot differentiate.

    Args:
        kernels: kernels of the loss.
        optimizer: optimizer, possibly one with Hessian-vector products.
        compiled: whether torch.compile compiles the training step.
        log_curvature: interval of measurements with Hessian-vector products; None: none.

    Raises:
        ValueError: optimizer or log needs second derivatives a kernel lacks, or the step is compiled; one line.
    """
    listed = tuple(kernels)
    if Registry("optimizers").load(optimizer.name).takes_hessian:
        remedy = "use another optimizer, or impl=reference"
        require_second_derivatives(listed, f"optimizer={optimizer.name}", remedy)
    if log_curvature is not None:
        remedy = "use log.curvature=null, or impl=reference"
        require_second_derivatives(listed, f"log.curvature={log_curvature}", remedy)
    if compiled and listed:
        raise ValueError(
            f"compile=true takes torch's own operations, and {listed[0].setting} has kernels; use compile=false, or "
            "impl=reference"
        )


def require_alpha_max(kernels: Iterable[Kernels], curvature: CurvatureSpec, what: str, remedy: str) -> None:
    """Refuse kernels of a loss without the derivatives needed by a measurement.

    Args:
        kernels: kernels of the loss; ``impl=auto`` is ignored.
        curvature: the measurement.
        what: subject of the message, e.g. ``hessian=true measures``.
        remedy: last words of the message, e.g. ``use hessian=false``.

    Raises:
        ValueError: a kernel lacks such a derivative; one line.
    """
    listed = tuple(kernels)
    by_autograd = [name for name in curvature.measure if name in DIFFERENTIATED_TWICE]
    if curvature.method == "double_backward":
        require_second_derivatives(listed, f"{what} α_max, which by method=double_backward", remedy)
    if by_autograd:
        require_second_derivatives(listed, f"{what} {by_autograd[0]}, which", remedy)
    require_second_derivatives(listed, f"{what} α_max, which", remedy, along_a_line=True)


def require_second_derivatives(
    kernels: Iterable[Kernels], what: str, remedy: str, *, along_a_line: bool = False
) -> None:
    """Refuse kernels of a loss without a second derivative.

    Args:
        kernels: kernels of the loss; ``impl=auto`` is ignored.
        what: subject of the message: the user of the derivative.
        remedy: last words of the message.
        along_a_line: whether the kernels' own derivative along a line (method taylor) is enough; else autograd must
            differentiate twice.

    Raises:
        ValueError: a kernel has no such derivative; one line.
    """
    for asked in kernels:
        if asked.impl != AUTO and not (along_a_line and asked.second_order):
            which = "second derivatives by autograd" if asked.second_order else "second derivatives"
            raise ValueError(f"{what} takes {which}, and {asked.setting} has none; {remedy}")


OF_RUN = (kernels_compute_the_run,)
OF_SWEEP = (kernels_are_measured_through,)
