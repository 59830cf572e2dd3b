"""Run the protocol of 5.2.1 on any model: measure real optimizer steps along their own direction."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stability.config.curvature import CurvatureSpec
from stability.curvature import (
    NO_CHANGE,
    NO_STEP,
    NOT_DEFINED,
    Directional,
    GradientWithGraph,
    alpha_max,
    directional,
    loss_along,
    paper_state,
    step_direction,
    step_without_decay,
)
from stability.objectives import Examples
from stability.optimizers import FindingRate, set_lr

Tensors = dict[str, Tensor]
LossSum = Callable[[Mapping[str, Tensor], Examples], tuple[Tensor, Tensor]]
EXACT = ("taylor", "double_backward")
COLUMNS = ("slope", "curvature", "alpha_max", "method", "rel_error")
DOUBTFUL = 1e-3  # relative error against central differences; beyond, float64 decides


@dataclass(frozen=True)
class Step:
    """One recorded optimizer step.

    ``loss`` and ``batches`` as in `stability.curvature.directional`; ``params`` is θ before the step; ``direction`` is
    u. ``result`` is the loss along u with its own slope, even if the row has the clipped gradient's.
    """

    loss: Callable[..., Any]
    batches: list[Examples] | None
    params: Tensors
    direction: Tensors
    result: Directional


class Descent:
    """Take optimizer steps on ``params`` in place and measure the recorded ones.

    Args:
        params: θ by name; updated by every step.
        optimizer: its groups may scale the base rate (`stability.optimizers.set_lr`).
        loss: ``loss(params, examples)`` → (sum, count) in nats and weights.
        examples: ``examples(index)`` → batch ``index`` of the protocol, B rows in every tensor.
        curvature: the protocol.
        lr: the base rate of every step; u has unit 1/lr, and α_max is a base rate, too.
        clip_norm: the largest gradient norm of the optimizer, if the protocol sets none.
        observe: called with each recorded `Step` before the parameters change; its result joins the row.
        loss_in_double: the same loss for float64 parameters and examples, to recompute the curvature with the worst
            disagreement with central differences (`in_double`); None: never.
        stepped_by: ``stepped_by(index)`` → the optimizer's gradient of batch ``index``, if training has dropout and
            ``loss`` has none. u then follows this gradient. Loss, slope (the clipped one, too, by the norm of
            ``loss``'s gradient) and curvature along u are those of ``loss``.
    """

    def __init__(
        self,
        params: Tensors,
        optimizer: torch.optim.Optimizer,
        loss: LossSum,
        examples: Callable[[int], Examples],
        curvature: CurvatureSpec,
        *,
        lr: float,
        clip_norm: float,
        observe: Callable[[Step], dict[str, Any]] | None = None,
        loss_in_double: Callable[[], LossSum] | None = None,
        stepped_by: Callable[[int], Tensors] | None = None,
    ):
        self.params, self.optimizer, self.loss, self.examples, self.curvature = (
            params,
            optimizer,
            loss,
            examples,
            curvature,
        )
        self.lr, self.clip_norm = lr, curvature.clip_norm or clip_norm
        self.observe, self.loss_in_double, self.stepped_by = observe, loss_in_double, stepped_by
        self._worst = DOUBTFUL  # relative error of the last step computed in float64

    def rows(self, state: str, own_state: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any] | None]:
        """Yield a row for each recorded step, and None for each warm-up step.

        A non-finite gradient ends the descent. This step and all later ones are rows with method "none" and no numbers,
        so the share of stable steps has a constant denominator. A zero step, or one without a change in loss, has no
        α_max: method "not defined", excluded from the share.

        Columns: ``note`` gives the reason for missing numbers, or the first parameter or module with non-finite values.
        ``gradient`` names the slope in α_max: "true" (the loss's own) or "clipped". ``rms_u`` is the root mean square
        of u's entries, to convert between the rate units of two optimizers.

        Args:
            state: "paper" (m and v are means, 5.2.1), "checkpoint" (``own_state``) or "plain".
            own_state: the optimizer's state dict for "checkpoint".
        """
        # one step would spread a non-finite parameter over all others
        broken = (name for name, param in self.params.items() if not param.isfinite().all())
        lost = next(({"note": f"params[{name!r}] is not finite"} for name in broken), None)
        gradient = self.curvature.gradient_of(state)
        if lost is None:
            self._start_from(state, own_state)
        first = self.curvature.warmup_batches
        for index in range(first, first + self.curvature.warmup_steps):
            if lost is None:
                self._set_gradient(self._gradient(index))
                self.optimizer.step()
            yield None
        for number in range(self.curvature.recorded_steps):
            row = self._record_step(first + self.curvature.warmup_steps, number, gradient) if lost is None else lost
            lost = row if "method" not in row else None
            yield {"step": number, "lr": self.lr, "gradient": gradient, "method": "none", **row}

    def _start_from(self, state: str, own_state: Mapping[str, Any] | None) -> None:
        """Set the optimizer's state and base rate."""
        if state == "checkpoint":
            assert own_state is not None
            # a copy: the optimizer updates the given tensors in place
            self.optimizer.load_state_dict(copy.deepcopy(dict(own_state)))
        elif state == "paper":
            paper_state(
                self.optimizer,
                (self._clip_gradient(index) for index in range(self.curvature.warmup_batches)),
                self.params,
            )
        else:
            self._warm_up_in_place()
        set_lr(self.optimizer, self.lr)

    def _warm_up_in_place(self) -> None:
        """Warm up the optimizer's averages and bias correction with steps at rate 0; θ is unchanged."""
        set_lr(self.optimizer, 0.0)
        for index in range(self.curvature.warmup_batches):
            self._set_gradient(self._gradient(index))
            self.optimizer.step()

    def _record_step(self, first: int, number: int, slope_of: str) -> dict[str, Any]:
        """Measure gradient, step and curvature along the step on batch ``first + number``.

        A non-finite gradient allows no step: the row then has only its origin.
        """
        loss, batches = self._objective(first + number)
        held = GradientWithGraph(loss, self.params, batches, method=self.curvature.method, check=number == 0 or None)
        gradient = held.gradient()
        if not _is_finite(gradient):
            return {"note": held.nonfinite()}
        kept = self._set_gradient(gradient)
        if self.stepped_by is not None:
            stepped_by = self.stepped_by(first + number)
            if not _is_finite(stepped_by):
                return {"note": "the gradient is not finite where something is dropped"}
            self._set_gradient(stepped_by)
        found = {"rate_found": self.optimizer.rate_found()} if isinstance(self.optimizer, FindingRate) else {}
        direction = self._step()
        size = {"rms_u": root_mean_square(direction)}
        if not any(tensor.any() for tensor in direction.values()):
            return {
                **size,
                "method": NOT_DEFINED,
                "note": NO_STEP,
                "loss_before": held.loss,
                "loss_after": self._loss_here(loss, batches),
            }
        along = held.along(direction)
        losses = {"loss_before": along.loss, "loss_after": self._loss_here(loss, batches), **found}
        if along.slope == along.curvature == 0:
            return {"method": NOT_DEFINED, "note": NO_CHANGE, **losses, **size}
        step = Step(loss, batches, held.params, direction, along)
        recorded = with_slope(along, kept * along.slope) if slope_of == "clipped" else along
        row = {key: getattr(recorded, key) for key in COLUMNS} | {"difference_curvature": along.difference}
        if number < self.curvature.parity_steps and along.method in EXACT:
            row |= compute_paper_difference(step, recorded.slope)
        row |= self._judge(step, first + number)
        observed = {} if self.observe is None else self.observe(step)
        return {**row, "note": along.nonfinite, **losses, **size, **observed}

    def _step(self) -> Tensors:
        """Take the optimizer's step; return its direction u.

        With ``weight_decay=false`` u is the step without decay from the same state.
        """
        decays = any(group.get("weight_decay") for group in self.optimizer.param_groups)
        undecayed = (
            step_without_decay(self.optimizer, self.params, self.lr)
            if decays and not self.curvature.weight_decay
            else None
        )
        taken = step_direction(self.optimizer, self.params, self.lr)
        return taken if undecayed is None else undecayed

    def _judge(self, step: Step, index: int) -> dict[str, float]:
        """Return the float64 curvature if this step has the worst disagreement with differences.

        Else {}; also if the model cannot compute in float64.
        """
        error = step.result.rel_error
        if error is None or not error > self._worst or step.result.method not in EXACT or self.loss_in_double is None:
            return {}
        self._worst, examples = error, self.examples(index)
        found = in_double(
            step, self.loss_in_double(), examples.split(self.curvature.microbatch or len(examples.targets_BN))
        )
        return {} if found is None else {"float64_curvature": found}

    def _objective(self, index: int) -> tuple[Callable[..., Any], list[Examples] | None]:
        """Return batch ``index``'s loss for `directional`: a scalar, or (sum, count) per microbatch."""
        examples, rows = self.examples(index), self.curvature.microbatch
        if rows is not None or self.curvature.method != "double_backward":
            return self.loss, [examples] if rows is None else examples.split(rows)

        def mean(params: Mapping[str, Tensor]) -> Tensor:
            total, count = self.loss(params, examples)
            return total / count

        return mean, None  # the gradient's graph can then be kept for the second derivative

    def _gradient(self, index: int) -> Tensors:
        """Return the optimizer's gradient for batch ``index``."""
        if self.stepped_by is not None:
            return self.stepped_by(index)
        loss, batches = self._objective(index)
        return GradientWithGraph(loss, self.params, batches, method="taylor").gradient()

    def _clip_gradient(self, index: int) -> Tensors:
        self._set_gradient(self._gradient(index))
        return {name: param.grad for name, param in self.params.items() if param.grad is not None}

    def _set_gradient(self, gradient: Tensors) -> float:
        """Set the optimizer's gradient, clipped by one factor as in training (`Devices.clip`); return that factor."""
        for name, tensor in gradient.items():
            self.params[name].grad = tensor
        norm = torch.nn.utils.clip_grad_norm_(list(self.params.values()), self.clip_norm)
        return min(1.0, self.clip_norm / (norm.item() + 1e-6))  # torch's own formula

    def _loss_here(self, loss: Callable[..., Any], batches: list[Examples] | None) -> float:
        return loss_along(loss, self.params, self.params, [0.0], batches=batches)[0]


def root_mean_square(tensors: Tensors) -> float:
    """Return the root mean square over all entries of all tensors, summed in float64.

    For u: a parameter's movement per unit of learning rate.
    """
    total = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    return math.sqrt(total / sum(tensor.numel() for tensor in tensors.values()))


def _is_finite(tensors: Tensors) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def compute_paper_difference(step: Step, slope: float) -> dict[str, float]:
    """Return uᵀHu by the paper's central gradient difference, raw ε = 1e-4 (Eq. 20).

    With α_max from this curvature and the row's own ``slope``.
    """
    found = directional(step.loss, step.params, step.direction, "parity", batches=step.batches)
    return {"parity_curvature": found.curvature, "parity_alpha_max": with_slope(found, slope).alpha_max}


def with_slope(result: Directional, slope: float) -> Directional:
    """Return the same curvature with another slope, and α_max (Eq. 18) from both."""
    # NaN: the loss itself was not finite
    ratio = math.nan if math.isnan(result.alpha_max) else alpha_max(slope, result.curvature)
    return replace(result, slope=slope, alpha_max=ratio)


def in_double(step: Step, loss: LossSum, batches: list[Examples]) -> float | None:
    """Return uᵀHu again in float64, same method, θ and u.

    Decides between curvature and central differences if these disagree in float32; float64's error is far below
    either's.

    Args:
        step: the recorded step.
        loss: (sum, count) in nats and weights, for float64 parameters.
        batches: its microbatches.

    Returns:
        uᵀHu; None if the model does not compute in float64, or the result is not finite.
    """
    if any(param.dtype == torch.float64 for param in step.params.values()):
        return step.result.curvature
    wide = [
        batch.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor) for batch in batches
    ]
    params, direction = (
        {name: tensor.detach().double() for name, tensor in held.items()} for held in (step.params, step.direction)
    )
    try:
        with torch.no_grad():
            if loss(params, wide[0])[0].dtype != torch.float64:
                return None  # part of the model uses a narrower type
        found = directional(loss, params, direction, step.result.method, batches=wide).curvature
    except (RuntimeError, TypeError):  # torch's errors for a float32-only module or kernel
        return None
    return found if math.isfinite(found) else None
