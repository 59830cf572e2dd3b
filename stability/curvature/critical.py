"""Critical learning rate: the first rise of the loss along u above L(θ).

It is found from losses alone. α_max predicts it to second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, mean_of, norm
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature._warnings import warn
from stability.curvature.products import directional

_FIRST_MOVE = 1e-3  # without a finite α_max the search starts with ‖αu‖ at this share of ‖θ‖


@dataclass(frozen=True)
class CriticalLR:
    """A critical learning rate with its bracket.

    Attributes:
        value: the α at the first rise of L(θ + αu) above L(θ). inf without a rise up to the limit; 0 if even the
            smallest step tried does not lower the loss; NaN if L(θ) is not finite.
        low: lower end of the bracket, L(low) ≤ L(θ).
        high: upper end, L(high) > L(θ).
        loss: L(θ).
        evaluations: number of evaluations of the loss.
        alpha_max: α_max for comparison; NaN if not computed.
    """

    value: float
    low: float
    high: float
    loss: float
    evaluations: int
    alpha_max: float = math.nan

    @property
    def over_alpha_max(self) -> float:
        """Critical rate over α_max; above 1, the second-order threshold is too careful.

        NaN if either is 0, infinite or unknown.
        """
        usable = 0 < self.alpha_max < math.inf and 0 < self.value < math.inf
        return self.value / self.alpha_max if usable else math.nan


@accept_any_tree
def loss_along(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    alphas: Sequence[float],
    *,
    batches: Iterable[Any] | None = None,
) -> list[float]:
    """Compute [L(θ + αu) for α in ``alphas``] by forward passes only.

    Each evaluation uses the same random state.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        alphas: step lengths α.
        batches: microbatches, as in `directional`.

    Returns:
        The losses in the order of ``alphas``, in the loss's unit.
    """
    line = _Line(loss_fn, params, direction, batches)
    return [line(alpha) for alpha in alphas]


@accept_any_tree
def critical_lr(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    start: float | None = None,
    alpha_max: float | None = None,
    limit: float | None = None,
    resolution: float = 1e-2,
    batches: Iterable[Any] | None = None,
) -> CriticalLR:
    """Find the first α at which the loss along u rises above L(θ).

    Up to this crossing L(θ + αu) ≤ L(θ). Only forward passes are used (Kalra and Barkeshli 2024, arXiv:2406.09405).

    α is first halved from ``start``, or from ``limit`` if that is smaller, at most 40 times, until the loss is below
    L(θ). If the first α itself is below, it is doubled up to ``limit`` while the loss is not above L(θ). The bracket is
    then bisected to ``resolution``·high, and the crossing interpolated in it.

    A rise and fall within one doubling is not detected. A loss that is not finite counts as above. Near 0 the
    differences drown in rounding: a value at which the loss differs by a few ulp is no crossing.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        start: first α tried. Default: half of ``alpha_max``; if that is 0 or ∞, ‖αu‖ = 1e-3‖θ‖ (1e-3 for θ = 0).
        alpha_max: α_max if known already; default: computed by `directional` if needed.
        limit: largest α at which the loss is computed; the result is ∞ if the loss is not above L(θ) there. Default:
            2²⁰·start.
        resolution: width of the bracket as a share of its upper end.
        batches: microbatches, as in `directional`.

    Returns:
        The critical rate with its bracket, and α_max. The rate depends on losses alone: a wrong derivative of a custom
        `autograd.Function` cannot change it. For ``alpha_max`` such a Function is checked as in `directional`; a doubt
        is a RuntimeWarning.

    Raises:
        ValueError: settings out of range, or as in `directional`.
    """
    if not 0 < resolution < 1:
        raise ValueError(f"resolution is {resolution}; it must lie between 0 and 1")
    line, known = _Line(loss_fn, params, direction, batches), math.nan if alpha_max is None else alpha_max
    if start is None:
        if alpha_max is None:
            along = directional(loss_fn, line.params, line.direction, batches=line.objective.batches)
            known = along.alpha_max
            if along.note:
                warn(f"alpha_max is in doubt: {along.note}")
        start = (
            known / 2
            if 0 < known < math.inf
            else _FIRST_MOVE * (norm(line.params) or 1.0) / (norm(line.direction) or 1.0)
        )
    if not (start > 0 and math.isfinite(start)):
        raise ValueError(f"start is {start}; a positive finite step length is needed")
    limit = start * 2.0**20 if limit is None else limit
    if not limit > 0:
        raise ValueError(f"limit is {limit}; a positive step length is needed")
    value, low, high = _search(line, start, limit, resolution)
    return CriticalLR(value, low, high, line(0.0), line.evaluations, known)


def _search(line: _Line, start: float, limit: float, resolution: float) -> tuple[float, float, float]:
    """Bracket the first crossing by halving or doubling, then bisect: (critical LR, low, high)."""
    base = line(0.0)
    if not math.isfinite(base):
        return math.nan, math.nan, math.nan
    low = start = min(start, limit)
    for _ in range(40):
        if line(low) < base:  # strictly: a step too small to change a float32 loss proves nothing
            break
        low /= 2
    else:
        return 0.0, 0.0, low * 2
    high = 2 * low
    if low == start:  # else the bracket is (low, 2·low) already
        while low < limit and line(high := min(2 * low, limit)) <= base:
            low = high
        if low == limit:
            return math.inf, low, math.inf
    while high - low > resolution * high:
        middle = (low + high) / 2
        low, high = (middle, high) if line(middle) <= base else (low, middle)
    fall, rise = base - line(low), line(high) - base
    return low + (high - low) * (fall / (fall + rise) if math.isfinite(rise) else 0.0), low, high


class _Line:
    """The loss along a line, α ↦ L(θ + αu); each value is computed once."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        batches: Iterable[Any] | None,
    ):
        self.params: Tensors = check_params(params)
        self.direction = check_direction(self.params, direction)
        self.objective, self.random = Objective(loss_fn, batches), RandomState(self.params)
        self._known: dict[float, float] = {}

    @property
    def evaluations(self) -> int:
        return len(self._known)

    def __call__(self, alpha: float) -> float:
        if alpha not in self._known:
            self._known[alpha] = self._loss(alpha)
        return self._known[alpha]

    def _loss(self, alpha: float) -> float:
        with torch.no_grad(), self.random.replay():
            moved = {name: param.detach().add(self.direction[name], alpha=alpha) for name, param in self.params.items()}
            return mean_of(*self.objective.total(moved, twice=False))
