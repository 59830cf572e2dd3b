"""α_max, Eq. 18 of the consensus paper (5.2), and its protocol (5.2.1).

This module depends on torch optimizers only.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import RandomState, norm

NOT_DEFINED = "not defined"  # the ``method`` of a step without an α_max: its row has a note and no numbers
NO_STEP = "the step is zero"
NO_CHANGE = "the loss does not change along the step"
ROUNDING_LIMIT = 1e-2  # float rounding above this share of a step makes step_direction warn


def alpha_max(slope: float, curvature: float) -> float:
    """Return the step length beyond which θ + αu no longer lowers the loss.

    To second order it is −2⟨∇L,u⟩ / uᵀHu (Eq. 18).

    Returns:
        α_max; 0 if u does not descend (slope >= 0); inf if u descends and the curvature is not positive. NaN if either
        number is NaN or infinite: a broken evaluation is neither stable nor unstable. NaN also if both are 0: u is
        zero, or the loss does not change along it, and no step length is too long or short enough.
    """
    if not (math.isfinite(slope) and math.isfinite(curvature)) or slope == curvature == 0:
        return math.nan
    if slope >= 0:
        return 0.0
    return -2 * slope / curvature if curvature > 0 else math.inf


def step_direction(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Tensor],
    lr: float,
    closure: Callable[[], Any] | None = None,
) -> dict[str, Tensor]:
    """Perform ``optimizer.step()`` and return its direction u = (θ⁺ − θ)/lr.

    This is the actual displacement, including decoupled weight decay. The subtraction is exact in float64, but θ⁺
    itself is rounded to the parameters' dtype. A warning is given if this rounding exceeds 1 % of the step, as at tiny
    lr.

    Args:
        optimizer: it makes its step.
        params: the optimizer's tensors by name, with gradients in ``.grad``.
        lr: divisor of the step; with several groups the base rate, so θ⁺ = θ + lr·u is still true.
        closure: for an optimizer that evaluates the loss again in its step (LBFGS).

    Returns:
        u by name.

    Raises:
        ValueError: lr is not positive and finite, a tensor is not in the optimizer, or a closure is missing.
    """
    if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr is {lr!r}; a positive finite number is needed to divide the step by")
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for name, param in params.items():
        if id(param) not in held:
            raise ValueError(
                f"params[{name!r}] is not among the tensors of this {type(optimizer).__name__}; its step would read "
                "as zero"
            )
    if closure is None and _needs_closure(optimizer):
        raise ValueError(f"closure is None; {type(optimizer).__name__}.step needs one: step_direction(…, closure=…)")
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step() if closure is None else optimizer.step(closure)
    direction: dict[str, Tensor] = {}
    lengths: dict[str, float] = {}
    for name, param in params.items():  # float64 for one tensor at a time: all of them at once would be twice the model
        difference = exact_difference(param.detach(), before[name])
        lengths[name] = norm({name: difference})
        direction[name] = difference.div_(lr).to(param.dtype)
    share = rounding_share(before, lengths)
    if share > ROUNDING_LIMIT:
        text = f"about {share:.0%} of this step is float rounding of the parameters; use a larger lr or float64 copies"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return direction


def step_without_decay(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    """Compute the direction u of the optimizer's next step without weight decay.

    Neither the optimizer nor ``params`` change. A twin of the optimizer steps on copies of parameters, gradients and
    state, with λ = 0 in every group and the random numbers of the optimizer's own next step. So no rule per class of
    decay is needed: decoupled (AdamW), proximal (Adan), times a rate of its own (Prodigy).

    The L2 penalty added to the gradient by SGD and Adam is left out, too. Its share in momentum and averages from
    earlier steps remains. Groups without an entry "weight_decay" have no decay.

    Args:
        optimizer: as in `step_direction`; it makes no step.
        params: as in `step_direction`.
        lr: as in `step_direction`.

    Returns:
        u by name.

    Raises:
        ValueError: the optimizer needs a closure (LBFGS, without decay): the closure's loss does not use the copies.
    """
    if _needs_closure(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which evaluates the optimizer's own parameters and not "
            "the copies that step_without_decay steps; use step_direction(…, closure=…)"
        )
    twin, copy_of = _copy_optimizer(optimizer)
    for group in twin.param_groups:
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
    with RandomState(params).replay():
        return step_direction(twin, {name: copy_of.get(id(param), param) for name, param in params.items()}, lr)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _copy_optimizer(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, dict[int, Tensor]]:
    """Copy the optimizer, its tensors and gradients; return the copies by the originals' ids, too."""
    copy_of: dict[int, Tensor] = {}
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        copied = torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        copied.grad = None if tensor.grad is None else tensor.grad.detach().clone()
        copy_of[id(tensor)] = copied
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    # hooks, and a scheduler's replacement of `step`, belong to the original and are left out
    hooks = {name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")}
    own = {name: value for name, value in vars(optimizer).items() if name not in hooks and name != "step"}
    vars(twin).update(copy.deepcopy(own, {**copy_of, id(optimizer): twin}), **{name: OrderedDict() for name in hooks})
    return twin, copy_of


def exact_difference(after: Tensor, before: Tensor) -> Tensor:
    return after.to(torch.float64, copy=True).sub_(before)


def rounding_share(before: Mapping[str, Tensor], lengths: Mapping[str, float]) -> float:
    """Return the share of a step due to rounding of θ⁺.

    θ⁺ is rounded to the parameters' dtype. ``lengths`` are the norms of each tensor's step.
    """
    moved = {name: tensor for name, tensor in before.items() if lengths[name]}
    # Rounding errs by ulp/sqrt(12) on average, with ulp between eps/2 and eps of the number.
    lost = math.hypot(
        *(0.75 * torch.finfo(tensor.dtype).eps * norm({name: tensor}) for name, tensor in moved.items())
    ) / math.sqrt(12)
    return lost / math.hypot(*(lengths[name] for name in moved)) if moved else 0.0


def has_paper_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has the means of g and g² set by `paper_state`.

    These are Adam and its subclass AdamW.
    """
    return isinstance(optimizer, torch.optim.Adam)


def paper_state(
    optimizer: torch.optim.Optimizer,
    gradients: Iterable[Mapping[str, Tensor] | Sequence[Tensor | None]],
    params: Mapping[str, Tensor] | None = None,
) -> None:
    """Set the state of Adam or AdamW according to the paper's protocol, 5.2.1.

    m and v become the means of g and g² over the warm-up batches; the step count becomes the number of batches. Both
    are unbiased already, yet the next step corrects their bias as its 6th (after 5 batches): it divides m by 0.469 and
    v by 0.006. The paper literally prescribes this (facts 1).

    Args:
        optimizer: Adam or AdamW; its state is overwritten.
        gradients: one item per warm-up batch, already clipped if the protocol clips: a dict by the names of ``params``,
            or a sequence in the order of the optimizer's parameters. An iterator is consumed one item at a time.
        params: the optimizer's tensors by name, for gradients by name.

    Raises:
        ValueError: another optimizer, no gradients, or gradients that do not fit its parameters.
    """
    if not has_paper_state(optimizer):
        raise ValueError(
            f"state=paper is defined for Adam and AdamW, not for {type(optimizer).__name__}; use the run's own state"
        )
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    names = _names_of(held, params)
    first: list[Tensor | None] = [None] * len(held)
    second: list[Tensor | None] = [None] * len(held)
    count = 0
    for item in gradients:
        count += 1
        for index, gradient in enumerate(_order(item, names, len(held))):
            if gradient is not None:
                gradient = gradient.detach()
                first[index] = _accumulate(first[index], gradient)
                second[index] = _accumulate(second[index], gradient.square())
    if count == 0:
        raise ValueError("gradients is empty; the protocol's state is a mean over at least one warm-up batch")
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for param, group, gradient_sum, square_sum in zip(held, groups, first, second, strict=True):
        if gradient_sum is not None and square_sum is not None:
            optimizer.state[param] = _adam_state(param, group, gradient_sum / count, square_sum / count, count)


def _accumulate(total: Tensor | None, term: Tensor) -> Tensor:
    return term.clone() if total is None else total.add_(term)


def _names_of(held: list[Tensor], params: Mapping[str, Tensor] | None) -> list[str] | None:
    if params is None:
        return None
    by_id = {id(tensor): name for name, tensor in params.items()}
    if any(id(tensor) not in by_id for tensor in held):
        raise ValueError("params does not name every tensor of the optimizer; pass dict(model.named_parameters())")
    return [by_id[id(tensor)] for tensor in held]


def _order(
    item: Mapping[str, Tensor] | Sequence[Tensor | None], names: list[str] | None, length: int
) -> Sequence[Tensor | None]:
    if isinstance(item, Mapping):
        if names is None:
            raise ValueError("gradients by name need params=dict(model.named_parameters()), which says whose they are")
        return [item.get(name) for name in names]
    if len(item) != length:
        raise ValueError(f"a list of {len(item)} gradients does not fit the optimizer's {length} parameters")
    return item


def _adam_state(param: Tensor, group: dict[str, Any], first: Tensor, second: Tensor, count: int) -> dict[str, Tensor]:
    on_device = group.get("capturable") or group.get("fused")
    state = {
        "step": torch.tensor(float(count), dtype=torch.float32, device=param.device if on_device else None),
        "exp_avg": first.to(param.dtype),
        "exp_avg_sq": second.to(param.dtype),
    }
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    return state
