"""The monitor's result for one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

NAN = math.nan


@dataclass(frozen=True)
class MonitorRow:
    """One measured optimizer step, θ⁺ = θ + lr·u, on the batch that it was taken on. Losses in the units of ``loss_fn``
    (nats, as a rule).

    - ``step``: number of steps begun before this one.
    - ``lr``: α, the rate of the first parameter group; of the largest one if the first is at 0 (then noted).
    - ``loss``: L(θ).
    - ``slope``: ⟨∇L, u⟩.
    - ``curvature``: uᵀHu.
    - ``alpha_max``: Eq. 18, −2·slope/curvature; ∞ without positive curvature, 0 where u ascends.
    - ``alpha_max_over_lr``: below 1, the step is beyond its second-order threshold.
    - ``predicted_change``: lr·slope + lr²·curvature/2.
    - ``actual_change``: L(θ⁺) − L(θ), same batch, dropout masks and buffers.
    - ``method``: what gave the curvature, "none" where nothing was measured, "not defined" where the step is zero or
      the loss does not change along it: such a step is neither stable nor unstable.
    - ``rel_error``: of the curvature against differences of gradients, where it was checked.
    - ``error_bar``: largest error of a curvature that central differences gave, in its unit; None for an exact one.
    - ``note``: why a number is missing, NaN or in doubt; None where nothing is amiss. α_max = ∞ is a result and has no
      note: ``curvature`` ≤ 0 says why.
    """

    step: int
    lr: float
    loss: float = NAN
    slope: float = NAN
    curvature: float = NAN
    alpha_max: float = NAN
    alpha_max_over_lr: float = NAN
    predicted_change: float = NAN
    actual_change: float = NAN
    method: str = "none"
    rel_error: float | None = None
    error_bar: float | None = None
    note: str | None = None
