"""Sharpness preconditioned by Adam, and its threshold of instability.

The preconditioned Hessian is P^{-1/2} H P^{-1/2} with Adam's own preconditioner P. Above the threshold Adam's steps
start to oscillate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import Tensors, check_params
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature.alpha_max import has_paper_state
from stability.curvature.lanczos import hessian_operator
from stability.curvature.spectrum import compute_largest


@dataclass(frozen=True)
class PreconditionedSharpness:
    """Adam's preconditioned sharpness and its threshold.

    Attributes:
        value: λ_max(P^{-1/2} H P^{-1/2}).
        residual: Lanczos' error bound of ``value``.
        threshold: (2 + 2β₁)/((1 − β₁)η).
        ratio: value / threshold. Above 1, Adam's step is unstable on the quadratic model, for any gradient.
        products: Hessian-vector products used.
        converged: whether the residual is within the tolerance.
    """

    value: float
    residual: float
    threshold: float
    ratio: float
    products: int
    converged: bool


def adam_threshold(lr: float, beta1: float) -> float:
    """Return Adam's stability threshold (2 + 2β₁)/((1 − β₁)η) of preconditioned sharpness.

    Beyond it, Adam with a frozen P diverges on a quadratic. It is 38/η at β₁ = 0.9. Source: Cohen et al. 2022,
    arXiv:2207.14484, Eq. 4 (heavy-ball with an exponential mean of gradients).
    """
    if not (lr > 0 and math.isfinite(lr) and 0 <= beta1 < 1):
        raise ValueError(f"lr={lr}, beta1={beta1}: lr must be positive and 0 <= beta1 < 1")
    return (2 + 2 * beta1) / ((1 - beta1) * lr)


def adam_preconditioner(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> Tensors:
    """Return Adam's preconditioner P = sqrt(v̂) + ε by name.

    v̂ = v/(1 − β₂ᵗ) as corrected by `torch.optim.Adam`; with amsgrad, v is its running maximum.

    Args:
        optimizer: Adam or AdamW.
        params: the optimizer's tensors by name.

    Raises:
        ValueError: another optimizer, a tensor not in it, or one without state (before the first step).
    """
    if not has_paper_state(optimizer):
        raise ValueError(
            f"the preconditioner is read from Adam's or AdamW's state, not from {type(optimizer).__name__}'s"
        )
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    found: Tensors = {}
    for name, param in params.items():
        state = optimizer.state.get(param, {})
        if id(param) not in groups or "exp_avg_sq" not in state:
            raise ValueError(
                f"params[{name!r}] has no second moment in this {type(optimizer).__name__}; take a step first"
            )
        group = groups[id(param)]
        second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        found[name] = (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
    return found


def scale_by_adam(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], rate: float) -> tuple[Tensors, float]:
    """Return P^{-1/2} by name, and the threshold at a rate.

    Args:
        optimizer: Adam or AdamW. A group with s times the rate counts with P/s.
        params: the optimizer's tensors by name.
        rate: the base learning rate.

    Returns:
        The factors, and the threshold; NaN if groups differ in β₁.

    Raises:
        ValueError: as in `adam_preconditioner`.
    """
    rates = {id(tensor): float(group["lr"]) for group in optimizer.param_groups for tensor in group["params"]}
    factors = {
        name: tensor.rsqrt() * math.sqrt(rates[id(params[name])] / rate)
        for name, tensor in adam_preconditioner(optimizer, params).items()
    }
    first, *others = {float(group["betas"][0]) for group in optimizer.param_groups}
    return factors, math.nan if others else adam_threshold(rate, first)


@accept_any_tree
def preconditioned_sharpness(
    loss_fn: Callable[..., Any],
    params: Tree,
    optimizer: torch.optim.Optimizer,
    *,
    held: Tree = None,
    batches: Iterable[Any] | None = None,
    tolerance: float = 1e-2,
    iterations: int = 64,
    seed: int = 0,
    lr: float | None = None,
) -> PreconditionedSharpness:
    """Compute Adam's preconditioned sharpness λ_max(P^{-1/2} H P^{-1/2}) by Lanczos.

    P comes from the optimizer's state, the threshold from its lr and β₁ (Cohen et al. 2022). Weight decay is not part
    of H.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        optimizer: Adam or AdamW with a state; it is only read.
        held: the optimizer's own tensors by name, if ``params`` are others (e.g. copies from before the step).
        batches: microbatches, as in `directional`.
        tolerance: as in `top_eigenvalue`.
        iterations: as in `top_eigenvalue`.
        seed: as in `top_eigenvalue`.
        lr: learning rate of the threshold; None: the first group's. A group with s times this rate counts with P/s.

    Returns:
        The sharpness, its threshold and their ratio. The last two are NaN if groups differ in β₁, because no such
        threshold exists then.

    Raises:
        ValueError: as in `adam_preconditioner` and `directional`.
    """
    tensors = params if held is None else held
    rate = float(optimizer.param_groups[0]["lr"]) if lr is None else lr
    factors, threshold = scale_by_adam(optimizer, tensors, rate)
    checked = check_params(params)
    found = compute_largest(hessian_operator(loss_fn, checked, batches, factors), checked, tolerance, iterations, seed)
    return PreconditionedSharpness(
        found.value, found.residual, threshold, found.value / threshold, found.products, found.converged
    )
