"""Check derivatives through a custom `autograd.Function` against differences, and find the origin of a NaN.

A NaN's origin is the first module with a non-finite output; the output's derivatives along u are checked, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from stability.curvature._autocast import switch_off
from stability.curvature._differences import curvature_of, pairs_at, relative_error, slope_at, slope_note
from stability.curvature._directional import Directional, Problem, double_backward_sums
from stability.curvature._graph import NoSecondDerivative
from stability.curvature._inputs import Objective, RandomState, Tensors
from stability.curvature._jet import parts
from stability.curvature.taylor import taylor_sums

# relative error allowed in a custom Function's second derivative, beyond the differences' own error bar
AGREEMENT = 1e-2


def check_result(problem: Problem, result: Directional, check: bool | None, unvouched: str = "") -> Directional:
    """Return the result, compared with differences if requested.

    Args:
        problem: loss, θ, u and random state.
        result: the numbers to check.
        check: True compares, False does not; None compares only with a custom Function.
        unvouched: name of a custom Function in the graph, "" without one.

    Raises:
        NoSecondDerivative: differences contradict a curvature through a custom Function.
    """
    if check is False or not (check or unvouched):
        return result
    reference, note = compare(problem, result.curvature, unvouched)
    share = relative_error(result.curvature, reference)
    return replace(result, rel_error=share, difference=reference, note=note or result.note)


def compare(problem: Problem, curvature: float, unvouched: str) -> tuple[float, str | None]:
    """Return uᵀHu by differences of gradients, and a note on doubts or None.

    Args:
        problem: loss, θ, u and random state.
        curvature: uᵀHu to compare with.
        unvouched: name of a custom Function in the graph, "" without one.

    Returns:
        uᵀHu, and a note if a custom Function's gradient is not the loss's derivative or differences are too coarse to
        check it.

    Raises:
        NoSecondDerivative: differences contradict a curvature through a custom Function.
    """
    reference, bar, doubt = _compute_by_differences(problem, unvouched)
    verdict = _verdict(unvouched, curvature, reference, bar)
    if verdict is None and unvouched:
        verdict, doubt = _verdict_in_own_types(problem, unvouched)
    if unvouched and verdict is None:
        doubt = f"{unvouched} (a custom autograd.Function): differences are too coarse here to check its derivatives"
    return reference, doubt


def _compute_by_differences(problem: Problem, unvouched: str) -> tuple[float, float, str | None]:
    """Return uᵀHu by differences, its error bar, and a custom Function's doubtful gradient."""
    given = problem.objective, problem.params, problem.direction
    pairs = pairs_at(*given, problem.random)
    doubt = slope_note(slope_at(*given, 0.0, problem.random), pairs) if unvouched else None
    return *curvature_of(pairs, problem.direction), doubt


def _verdict(unvouched: str, curvature: float, reference: float, bar: float) -> bool | None:
    """Return True if differences confirm the curvature, None if too coarse; else raise."""
    off, size = abs(curvature - reference), max(abs(curvature), abs(reference))
    if bar > size > 0:
        return None
    if unvouched and off > bar + AGREEMENT * size:  # false for NaN
        raise NoSecondDerivative(
            f"{unvouched} (a custom autograd.Function) has a wrong second derivative: uᵀHu comes out as "
            f"{curvature:.4g}, by differences of gradients as {reference:.4g} ± {bar:.1g}; use "
            "method='finite_difference'"
        )
    return True


def _verdict_in_own_types(problem: Problem, unvouched: str) -> tuple[bool | None, str | None]:
    """Return `_verdict` and the gradient's doubt without autocast; None if the loss needs it."""
    # the narrow types of autocast make differences coarse
    with switch_off({param.device.type for param in problem.params.values()}):
        try:
            curvature = double_backward_sums(problem)[0].result("double_backward").curvature
            reference, bar, doubt = _compute_by_differences(problem, unvouched)
        except NoSecondDerivative:
            raise
        except RuntimeError:  # types that only fit under autocast
            return None, None
    return _verdict(unvouched, curvature, reference, bar), doubt


_KINDS = ("output", "first derivative along u", "second derivative along u")


def find_nonfinite(objective: Objective, params: Tensors, direction: Tensors, random: RandomState) -> str:
    """Return one line with the name of the first non-finite parameter, direction or module.

    It makes one more evaluation. Module names start at the outermost module called.

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        random: random state of the evaluation.
    """
    for owner, tensors in (("params", params), ("direction", direction)):
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                return f"{owner}[{name!r}] is not finite"
    watch, objective = _Watch(), objective.drop_recordings()  # a recording calls no module
    handles = [register_module_forward_pre_hook(watch.enter), register_module_forward_hook(watch.leave)]
    try:
        taylor_sums(objective, params, direction, random)
    except (RuntimeError, TypeError, AttributeError, AssertionError):  # taylor fails: check the values alone
        watch.clear()
        with random.replay(), torch.no_grad():
            for _ in objective.terms(params):
                pass
    finally:
        for handle in handles:
            handle.remove()
    return watch.found or "every module's output is finite; the loss or a derivative of it is not"


class _Watch:
    """Global hooks that record the first module with a NaN or +∞.

    First means innermost and earliest; the output and its derivatives are checked. −∞ is allowed, because masks consist
    of it.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.found: str | None = None
        self.root: nn.Module | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        self.root = self.root or module

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the first module with a NaN or +∞ in its output.

        Args:
            module: the module called.
            args: its inputs.
            output: its output, nested or not; its derivatives are checked, too.
        """
        if self.found is not None or self.root is None:
            return
        for tensor in _tensors(output):
            for kind, part in zip(_KINDS, parts(tensor), strict=True):
                if part is not None and part.is_floating_point() and bool((part.isnan() | (part == torch.inf)).any()):
                    names = {id(child): name for name, child in self.root.named_modules()}
                    self.found = (
                        f"the {kind} of {names.get(id(module)) or 'the model'} ({type(module).__name__}) is the "
                        "first that is not finite"
                    )
                    return


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]
