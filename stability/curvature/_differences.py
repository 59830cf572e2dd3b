"""Central differences of gradients along a direction, with an error bar.

The paper's raw ε = 1e-4 is available for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stability.curvature._autocast import Autocast, record_autocasts
from stability.curvature._graph import check_used, graph_nodes, plain_gradient
from stability.curvature._inputs import Objective, RandomState, Tensors, check_count, dot, mean_of, norm
from stability.curvature.recorded import RecordedLoss

# c = ε‖u‖. The paper's raw ε errs by up to 28 % along AdamW's u and can flip the sign; c in [1e-3, 1e-2] by 0.17 %
# (facts 8).
DISPLACEMENTS = (1e-2, 3e-3)
PARITY_EPSILON = 1e-4  # the paper's, Eq. 20
_ROUNDINGS = 8.0  # roundings charged to each component of a gradient in the error bar
_SLOPES_AGREE = 5e-2  # relative difference between the slopes by gradient and by losses allowed without a note
_SAFETY = 2.0  # both parts of the bar are estimates; measured errors reached 1.02 of their sum in 1 of 128 cases


@dataclass(frozen=True)
class Slope:
    """One gradient, projected on u.

    Attributes:
        loss: L.
        slope: ⟨∇L, u⟩.
        magnitude: Σ|g_i u_i|; the slope's rounding error is proportional to it.
        precision: eps of the narrowest type in the loss's computation.
    """

    loss: float
    slope: float
    magnitude: float
    precision: float


def slope_at(objective: Objective, params: Tensors, direction: Tensors, shift: float, random: RandomState) -> Slope:
    """Compute the loss and its slope at params + shift·direction.

    Only one microbatch's graph exists at a time.

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        shift: distance from θ in units of u.
        random: random state of the evaluation.

    Returns:
        L, ⟨∇L, u⟩ and Σ|g_i u_i|; with several microbatches, the last is an upper bound.
    """
    with torch.no_grad():
        moved = {
            name: param.detach().add(direction[name], alpha=shift) if shift else param.detach()
            for name, param in params.items()
        }
    loss = slope = magnitude = total = precision = 0.0
    with random.replay(), torch.enable_grad():
        for term in gradient_terms(objective, moved, precise=True):
            precision = max(precision, term.precision)
            for name, gradient in term.gradients.items():
                if gradient is not None:
                    slope += dot(gradient, direction[name])
                    magnitude += dot(gradient.abs(), direction[name].abs())
            loss, total = loss + term.value, total + term.count
    return Slope(mean_of(loss, total), mean_of(slope, total), mean_of(magnitude, total), precision)


@dataclass(frozen=True)
class Pair:
    """Slopes at θ + εu (ahead) and θ − εu (behind)."""

    epsilon: float
    ahead: Slope
    behind: Slope

    @property
    def curvature(self) -> float:
        return (self.ahead.slope - self.behind.slope) / (2 * self.epsilon)

    @property
    def rounding(self) -> float:
        """Estimated rounding error of the curvature."""
        lost = sum(each.precision * each.magnitude for each in (self.ahead, self.behind))
        return _ROUNDINGS * lost / (2 * self.epsilon)


def pair_at(objective: Objective, params: Tensors, direction: Tensors, epsilon: float, random: RandomState) -> Pair:
    """Compute the slopes at θ ± εu for a central difference.

    `Pair.curvature` is uᵀHu ≈ [⟨∇L(θ+εu), u⟩ − ⟨∇L(θ−εu), u⟩] / 2ε (Eq. 20, projected).

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        epsilon: ε.
        random: random state of both evaluations.
    """
    return Pair(epsilon, *(slope_at(objective, params, direction, sign * epsilon, random) for sign in (1, -1)))


def pairs_at(objective: Objective, params: Tensors, direction: Tensors, random: RandomState) -> list[Pair]:
    """Compute the pairs at both `DISPLACEMENTS` c = ε‖u‖.

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        random: random state of all evaluations.

    Returns:
        Two pairs; none if u is zero or not finite.
    """
    length = norm(direction)
    if length == 0 or not math.isfinite(length):
        return []
    return [pair_at(objective, params, direction, c / length, random) for c in DISPLACEMENTS]


def curvature_of(pairs: list[Pair], direction: Tensors) -> tuple[float, float]:
    """Return uᵀHu from the pairs at both displacements, with an error bar.

    Of the two values, the one with the smaller sum of truncation and rounding error is returned. Its bar is 2·(|d| +
    its rounding error), with d the difference between both.
    """
    if not pairs:
        nothing = norm(direction) * 0  # 0 for no step, NaN for a broken one
        return nothing, nothing
    # The truncation error grows as c²: with the difference d of both values, it is 1.1·d at the larger c and 0.1·d at
    # the smaller one. The rounding error falls as 1/c.
    wide, narrow = (pair.curvature for pair in pairs)
    wide_rounding, narrow_rounding = (pair.rounding for pair in pairs)
    difference, ratio = abs(wide - narrow), (DISPLACEMENTS[1] / DISPLACEMENTS[0]) ** 2
    if difference / (1 - ratio) + wide_rounding < difference * ratio / (1 - ratio) + narrow_rounding:
        return wide, _SAFETY * (difference + wide_rounding)
    return narrow, _SAFETY * (difference + narrow_rounding)


def slope_note(center: Slope, pairs: list[Pair]) -> str | None:
    """Return a note if the gradient's slope contradicts the losses, else None.

    A note is given if ⟨∇L, u⟩ is not (L(θ+εu) − L(θ−εu)) / 2ε at either displacement. None also if the errors exceed
    both numbers, or if a number is not finite.
    """
    for pair in pairs:
        ahead, behind, epsilon = pair.ahead, pair.behind, pair.epsilon
        # The truncation errors are ε²/2 and ε²/6 times the third derivative; the mean of both slopes measures them. The
        # loss's own second difference measures its noise.
        by_loss = (ahead.loss - behind.loss) / (2 * epsilon)
        noise = abs(ahead.loss + behind.loss - 2 * center.loss - pair.curvature * epsilon**2)
        noise += _ROUNDINGS * center.precision * abs(center.loss)
        truncation = abs((ahead.slope + behind.slope) / 2 - center.slope)
        size = max(abs(by_loss), abs(center.slope))
        allowed = (
            _SLOPES_AGREE * size
            + _SAFETY * (truncation + noise / epsilon)
            + _ROUNDINGS * center.precision * center.magnitude
        )
        if not abs(by_loss - center.slope) > allowed or allowed > size:  # true for NaN, too
            return None
    if not pairs:
        return None
    return (
        f"the slope of loss_fn is {by_loss:.4g} by differences of the loss, {center.slope:.4g} by its gradient: its "
        "gradient is not its derivative (detach, straight-through, or another function computed again in backward)"
    )


def relative_error(a: float, b: float) -> float:
    """Return |a − b| / max(|a|, |b|), or 0 if both are 0."""
    return abs(a - b) / max(abs(a), abs(b), torch.finfo(torch.float64).tiny)


class GradientTerm(NamedTuple):
    """One microbatch's gradient.

    Attributes:
        value: the loss's sum.
        count: its count.
        gradients: ∂value/∂θ by name; None for an unused parameter.
        precision: eps of the narrowest type in the computation; NaN if not requested.
    """

    value: float
    count: float
    gradients: dict[str, Tensor | None]
    precision: float


def gradient_terms(objective: Objective, params: Tensors, *, precise: bool = False) -> Iterator[GradientTerm]:
    """Yield each microbatch's gradient; only one graph exists at a time.

    Args:
        objective: the loss.
        params: θ by name.
        precise: whether to find the precision, which takes a walk over the graph.

    Raises:
        ValueError: the loss depends on none of the parameters.
    """
    precise |= isinstance(objective.loss_fn, RecordedLoss)  # a recording has one graph for all its runs

    def function(at: Tensors, batch: tuple[Any, ...]) -> list[Any]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
        with record_autocasts() as autocasts:
            value, count = objective.term(leaves, *batch, twice=False)
        precision = precision_of(value, leaves, autocasts.entries) if precise else math.nan
        gradients = plain_gradient(value, leaves)
        check_used(gradients)
        return [value.detach(), count, precision, *gradients.values()]

    for value, count, precision, *gradients in objective.evaluate("gradient", function, dict(params)):
        yield GradientTerm(value.item(), check_count(count), dict(zip(params, gradients, strict=True)), precision)


def precision_of(value: Tensor, params: Tensors, inside: Iterable[Autocast]) -> float:
    """Return the eps of the narrowest type in a loss's computation.

    Args:
        value: the loss, or outputs, with its graph.
        params: the tensors it was computed from.
        inside: autocasts entered by the loss. The graph alone is not enough: it shows only the ends of a compiled part.
    """
    devices = {param.device.type for param in params.values()}
    types = {param.dtype for param in params.values()}
    types |= {entry.dtype for node in graph_nodes(value) for entry in getattr(node, "_input_metadata", ())}
    types |= {each.dtype for each in inside if each.device in devices and each.gradients}
    types |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return max(torch.finfo(each).eps for each in types if each.is_floating_point)
