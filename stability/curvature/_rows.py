"""The monitor's result for one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

NAN = math.nan


@dataclass(frozen=True)
class MonitorRow:
    """One measured optimizer step, θ⁺ = θ + lr·u, on its own batch.

    Losses are in the unit of ``loss_fn`` (usually nats).

    Attributes:
        step: number of earlier steps.
        lr: α, the rate of the first parameter group; the largest rate if the first is 0 (then noted).
        loss: L(θ).
        slope: ⟨∇L, u⟩.
        curvature: uᵀHu.
        alpha_max: Eq. 18, −2·slope/curvature; ∞ without positive curvature, 0 if u ascends.
        alpha_max_over_lr: below 1, the step exceeds its second-order threshold.
        predicted_change: lr·slope + lr²·curvature/2.
        actual_change: L(θ⁺) − L(θ), with the same batch, dropout masks and buffers.
        method: source of the curvature. "none": nothing was measured. "not defined": the step is zero or the loss does
            not change along it, so the step is neither stable nor unstable.
        rel_error: relative error of the curvature against differences of gradients; None without a check.
        error_bar: largest error of a curvature by central differences, in its unit; None for an exact one.
        note: reason for a number missing, NaN or in doubt; None without one. α_max = ∞ is a result and has no note:
            ``curvature`` ≤ 0 explains it.
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
