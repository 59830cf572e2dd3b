"""Compare derivatives that came through a custom `autograd.Function`, for which nobody vouches, with differences."""

from __future__ import annotations

from dataclasses import replace

from stability.curvature._autocast import switched_off
from stability.curvature._differences import curvature_of, pairs_at, relative_error, slope_at, slope_note
from stability.curvature._directional import Directional, Problem, double_backward_sums
from stability.curvature._graph import NoSecondDerivative

# relative, beyond the differences' own error bar: what a custom Function's second derivative may be off by and still be
# believed
AGREEMENT = 1e-2


def checked(problem: Problem, result: Directional, check: bool | None, unvouched: str = "") -> Directional:
    """Return the result with what ``check`` asks for. ``unvouched``: the name of a custom Function in the graph, ""
    where there is none.

    Raises `NoSecondDerivative` where differences of gradients contradict the curvature that came through such a
    Function.
    """
    if check is False or not (check or unvouched):
        return result
    reference, note = compared(problem, result.curvature, unvouched)
    share = relative_error(result.curvature, reference)
    return replace(result, rel_error=share, difference=reference, note=note or result.note)


def compared(problem: Problem, curvature: float, unvouched: str) -> tuple[float, str | None]:
    """Return uᵀHu by differences, and a note if the gradient through a custom Function is not the loss's derivative, or
    if differences are too coarse to tell.

    Raises `NoSecondDerivative` where they contradict a curvature that came through such a Function.
    """
    reference, bar, doubt = _differenced(problem, unvouched)
    verdict = _verdict(unvouched, curvature, reference, bar)
    if verdict is None and unvouched:
        verdict, doubt = _verdict_in_own_types(problem, unvouched)
    if unvouched and verdict is None:
        doubt = f"{unvouched} (a custom autograd.Function): differences are too coarse here to check its derivatives"
    return reference, doubt


def _differenced(problem: Problem, unvouched: str) -> tuple[float, float, str | None]:
    """Return uᵀHu by differences with its error bar, and through a custom Function what they say of its gradient."""
    given = problem.objective, problem.params, problem.direction
    pairs = pairs_at(*given, problem.random)
    doubt = slope_note(slope_at(*given, 0.0, problem.random), pairs) if unvouched else None
    return *curvature_of(pairs, problem.direction), doubt


def _verdict(unvouched: str, curvature: float, reference: float, bar: float) -> bool | None:
    """Return True if differences confirm the curvature, None if their error exceeds both numbers; raise
    `NoSecondDerivative` if they contradict one through a custom Function. NaN contradicts nothing."""
    off, size = abs(curvature - reference), max(abs(curvature), abs(reference))
    if bar > size > 0:
        return None
    if unvouched and off > bar + AGREEMENT * size:
        raise NoSecondDerivative(
            f"{unvouched} (a custom autograd.Function) has a wrong second derivative: uᵀHu comes out as "
            f"{curvature:.4g}, by differences of gradients as {reference:.4g} ± {bar:.1g}; use "
            "method='finite_difference'"
        )
    return True


def _verdict_in_own_types(problem: Problem, unvouched: str) -> tuple[bool | None, str | None]:
    """Return `_verdict` and the note on the gradient without autocast, whose narrow types make differences coarse; None
    if the loss does not run so."""
    with switched_off({param.device.type for param in problem.params.values()}):
        try:
            curvature = double_backward_sums(problem)[0].result("double_backward").curvature
            reference, bar, doubt = _differenced(problem, unvouched)
        except NoSecondDerivative:
            raise
        except RuntimeError:  # types that only fit under autocast
            return None, None
    return _verdict(unvouched, curvature, reference, bar), doubt
