"""Parts of curvature and gradient.

The Gauss–Newton part of uᵀHu, the shares of parameter blocks, and the gradient's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature._autocast import record_autocasts, switch_off
from stability.curvature._differences import DISPLACEMENTS, gradient_terms, precision_of
from stability.curvature._graph import NoSecondDerivative, custom_function
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, dot, norm
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature._vouching import AGREEMENT
from stability.curvature.products import directional, hvp


@dataclass(frozen=True)
class GaussNewton:
    """The Gauss–Newton part of a curvature.

    Attributes:
        part: uᵀJᵀH_out J u.
        curvature: uᵀHu.
        share: part / curvature, NaN if uᵀHu is 0. The rest comes from the model's own second derivative.
    """

    part: float
    curvature: float
    share: float


@accept_any_tree
def gauss_newton(
    model_fn: Callable[..., Tensor],
    output_loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    batches: Iterable[Any] | None = None,
) -> GaussNewton:
    """Compute the Gauss–Newton part of uᵀHu for a loss in two parts.

    Sources: Schraudolph 2002; Sagun et al. 2017, arXiv:1706.04454. Ju is one forward-mode derivative of the outputs
    (torch.func.jvp; correct through LayerNorm, facts 8). The loss's second derivative along Ju follows at fixed
    outputs. uᵀHu is `directional` of the composition.

    Args:
        model_fn: ``model_fn(params) -> outputs`` (one tensor); with ``batches``, ``model_fn(params, batch)``.
        output_loss_fn: ``output_loss_fn(outputs) -> scalar``; with ``batches``, ``output_loss_fn(outputs, batch) ->
            (sum, count)``, combined as one mean.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        batches: microbatches, as in `directional`.

    Returns:
        The part, the whole curvature, and their ratio.

    Raises:
        ValueError: as in `directional`.
        NoSecondDerivative: differences of the outputs contradict a custom Function's forward mode.
        RuntimeError: from torch, for an operation without a forward mode.
    """
    params = check_params(params)
    direction = check_direction(params, direction)
    listed = None if batches is None else list(batches)
    random = RandomState(params)

    def compose(at: Tensors, *batch: Any) -> Any:
        return output_loss_fn(model_fn(at, *batch), *batch)

    whole = directional(compose, params, direction, batches=listed)
    outputs, moves = _compute_all_moves(model_fn, params, direction, listed, random)
    loss, indices = _split_output_loss(output_loss_fn, listed)
    part = directional(loss, outputs, moves, batches=indices).curvature
    return GaussNewton(part, whole.curvature, part / whole.curvature if whole.curvature else math.nan)


@accept_any_tree
def gauss_newton_product(
    model_fn: Callable[..., Tensor],
    output_loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    batches: Iterable[Any] | None = None,
) -> Tree:
    """Compute G u = JᵀH_out J u, the Gauss–Newton matrix times a vector.

    It costs one forward-mode derivative Ju, one product with the output loss's Hessian, and one backward pass.

    Args:
        model_fn: the model, as in `gauss_newton`.
        output_loss_fn: the loss of its outputs, as in `gauss_newton`.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        batches: microbatches, as in `directional`.

    Returns:
        G u with the structure of ``params``.

    Raises:
        ValueError: as in `gauss_newton`.
        NoSecondDerivative: as in `gauss_newton`.
        RuntimeError: as in `gauss_newton`.
    """
    params = check_params(params)
    direction = check_direction(params, direction)
    listed, random = None if batches is None else list(batches), RandomState(params)
    outputs, moves = _compute_all_moves(model_fn, params, direction, listed, random)
    loss, indices = _split_output_loss(output_loss_fn, listed)
    bends = hvp(loss, outputs, moves, batches=indices)
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    total = {name: torch.zeros_like(param) for name, param in leaves.items()}
    with random.replay(), torch.enable_grad():
        for index, batch in enumerate(_batches(listed)):
            found = model_fn(leaves, *batch)
            pulled = torch.autograd.grad(found, list(leaves.values()), bends[str(index)], allow_unused=True)
            for name, part in zip(leaves, pulled, strict=True):
                total[name] = total[name] if part is None else total[name] + part
    return total


def _batches(listed: list[Any] | None) -> list[tuple[Any, ...]]:
    return [()] if listed is None else [(item,) for item in listed]


def _split_output_loss(output_loss_fn: Callable[..., Any], listed: list[Any] | None) -> tuple[Callable[..., Any], Any]:
    """Return the loss of all outputs by batch index, and the indices or None."""
    if listed is None:
        return lambda at: output_loss_fn(at["0"]), None
    return lambda at, index: output_loss_fn(at[str(index)], listed[index]), range(len(listed))


def _compute_all_moves(
    model_fn: Callable[..., Tensor], params: Tensors, direction: Tensors, listed: list[Any] | None, random: RandomState
) -> tuple[Tensors, Tensors]:
    """Return the outputs and their derivatives Ju, by batch index."""
    with random.replay(), sdpa_kernel(SDPBackend.MATH):
        pairs = [_compute_moves(model_fn, params, direction, batch) for batch in _batches(listed)]
    outputs, moves = ({str(index): pair[k] for index, pair in enumerate(pairs)} for k in (0, 1))
    _check_moves(model_fn, params, direction, _batches(listed)[0], moves["0"], random)
    return outputs, moves


def _check_moves(
    model_fn: Callable[..., Tensor],
    params: Tensors,
    direction: Tensors,
    batch: tuple[Any, ...],
    moves: Tensor,
    random: RandomState,
) -> None:
    """Compare Ju with differences of the outputs if the graph has a custom Function."""
    # a custom Function may have its own forward mode; that of a `torch.library.custom_op` is silently zero
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    with random.replay(), torch.enable_grad():
        unvouched = custom_function(model_fn(leaves, *batch))
    if not unvouched or not moves.numel():
        return
    given = model_fn, params, direction, batch, random
    try:
        with switch_off({param.device.type for param in params.values()}):  # autocast makes differences coarse
            contradicted = _is_contradicted(*given)
    except RuntimeError:  # types that only fit under autocast
        contradicted = _is_contradicted(*given)
    if contradicted:
        raise NoSecondDerivative(
            f"{unvouched} (a custom autograd.Function) has a wrong forward-mode derivative: Ju differs from "
            "differences of the outputs; give it a jvp"
        )


def _is_contradicted(
    model_fn: Callable[..., Tensor], params: Tensors, direction: Tensors, batch: tuple[Any, ...], random: RandomState
) -> bool:
    """Return whether differences of the outputs along u contradict Ju."""
    with random.replay(), sdpa_kernel(SDPBackend.MATH):
        moves = _compute_moves(model_fn, params, direction, batch)[1]
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    with random.replay(), torch.enable_grad(), record_autocasts() as autocasts:
        precision = precision_of(model_fn(leaves, *batch), leaves, autocasts.entries)
    size = DISPLACEMENTS[1] / (norm(direction) or 1.0)
    ends = []
    for shift in (size, -size):
        with random.replay(), torch.no_grad():
            moved = {name: param.detach() + shift * direction[name] for name, param in params.items()}
            ends.append(model_fn(moved, *batch).double())
    found = (ends[0] - ends[1]) / (2 * size)
    rounding = precision * float(ends[0].norm()) / size
    return float((found - moves).norm()) > AGREEMENT * float(found.norm()) + rounding


def _compute_moves(
    model_fn: Callable[..., Tensor], params: Tensors, direction: Tensors, batch: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    primals = {name: param.detach() for name, param in params.items()}
    with torch.no_grad():
        pair = torch.func.jvp(lambda at: model_fn(at, *batch), (primals,), (direction,))
    outputs, moves = pair[0], pair[1]
    if not isinstance(outputs, Tensor):
        raise ValueError(f"model_fn returned a {type(outputs).__name__}; one tensor of outputs is needed")
    return outputs.detach(), moves.detach()


@accept_any_tree
def block_shares(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    *,
    batches: Iterable[Any] | None = None,
    block: Callable[[str], str] | int = 2,
) -> dict[str, float]:
    """Compute u_b·(Hu)_b of every parameter block b, by one Hessian-vector product.

    The shares add up to uᵀHu = Σ_b u_bᵀ(Hu)_b. Each includes b's coupling with all other blocks, so it may be negative.

    Args:
        loss_fn: the loss, as in `directional`.
        params: θ, as in `directional`.
        direction: u, as in `directional`.
        batches: microbatches, as in `directional`.
        block: a function from a parameter's name to its block's; or the number of leading dotted parts of the name that
            make a block ("blocks.0.mixer.qkv.weight" at 2 belongs to "blocks.0").

    Returns:
        The shares by block.

    Raises:
        ValueError: as in `hvp`; ``block`` below 1.
        NoSecondDerivative: as in `hvp`.
    """
    if isinstance(block, int) and block < 1:
        raise ValueError(f"block is {block}; give at least one leading part of the names")
    depth = block
    name_of = (lambda name: ".".join(name.split(".")[:depth])) if isinstance(depth, int) else depth
    product = hvp(loss_fn, params, direction, batches=batches)
    shares: dict[str, float] = {}
    for name, part in product.items():
        shares[name_of(name)] = shares.get(name_of(name), 0.0) + dot(direction[name], part)
    return shares


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale of a gradient.

    ``trace`` and ``gradient_sq`` are unbiased estimates.

    Attributes:
        value: B_simple = trace / gradient_sq, in the unit of the counts; inf if gradient_sq ≤ 0 (the noise hides the
            gradient).
        trace: tr Σ of one item's gradient.
        gradient_sq: |G|².
        microbatches: number of microbatches used.
    """

    value: float
    trace: float
    gradient_sq: float
    microbatches: int


@accept_any_tree
def gradient_noise_scale(loss_fn: Callable[..., Any], params: Tree, batches: Iterable[Any]) -> NoiseScale:
    """Estimate the simple noise scale from the gradients of microbatches.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1. Two equations determine |G|² and tr Σ: E|g_i|² =
    |G|² + tr Σ/b_i for one microbatch, and |G|² + tr Σ/B for all together. With equal counts they are the paper's.

    Args:
        loss_fn: ``loss_fn(params, batch) -> (sum, count)``, b_i = count.
        params: θ, as in `directional`.
        batches: microbatches. Their counts must be of independent items (sequences, rather than their tokens).

    Returns:
        The noise scale with |G|² and tr Σ.

    Raises:
        ValueError: fewer than two microbatches with a count above 0.
    """
    params = check_params(params)
    total, squares, counts = {name: torch.zeros_like(param.detach()) for name, param in params.items()}, [], []
    with RandomState(params).replay(), torch.enable_grad():
        for term in gradient_terms(Objective(loss_fn, batches), params):
            present = {name: gradient for name, gradient in term.gradients.items() if gradient is not None}
            for name, gradient in present.items():
                total[name] += gradient
            if term.count:
                squares.append((norm(present) / term.count) ** 2)
                counts.append(term.count)
    if len(counts) < 2:
        raise ValueError(f"a noise scale needs at least two microbatches that count something; there are {len(counts)}")
    small, large = sum(squares) / len(squares), (norm(total) / sum(counts)) ** 2
    inverse_small, inverse_large = sum(1 / count for count in counts) / len(counts), 1 / sum(counts)
    trace = (small - large) / (inverse_small - inverse_large)
    gradient_sq = large - trace * inverse_large
    value = trace / gradient_sq if gradient_sq > 0 else math.nan if math.isnan(gradient_sq) else math.inf
    return NoiseScale(value, trace, gradient_sq, len(counts))
