"""Decompose curvature and gradient: the Gauss–Newton part of uᵀHu, the parameter blocks' shares, the gradient's
noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature._graph import check_used, plain_gradient
from stability.curvature._inputs import Objective, RandomState, Tensors, check_direction, check_params, dot, norm
from stability.curvature.products import directional, hvp


@dataclass(frozen=True)
class GaussNewton:
    """The Gauss–Newton part of a curvature. ``part``: uᵀJᵀH_out J u. ``curvature``: uᵀHu. ``share``: part / curvature,
    NaN where uᵀHu is 0; the rest is the model's own bend."""

    part: float
    curvature: float
    share: float


def gauss_newton(
    model_fn: Callable[..., Tensor],
    output_loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    *,
    batches: Iterable[Any] | None = None,
) -> GaussNewton:
    """Compute the Gauss–Newton part of uᵀHu (Schraudolph 2002; Sagun et al. 2017, arXiv:1706.04454), for a loss given
    in two parts.

    ``model_fn(params) -> outputs`` (one tensor) and ``output_loss_fn(outputs) -> scalar``; with ``batches``,
    ``model_fn(params, batch)`` and ``output_loss_fn(outputs, batch) -> (sum, count)``, combined as one mean. Ju is one
    forward-mode derivative of the outputs (right through LayerNorm, facts 8; torch.func.jvp), then the loss's second
    derivative along Ju at fixed outputs; uᵀHu is `directional` of the composition. Errors: those of `directional`; what
    torch says where an operation has no forward mode.
    """
    params = check_params(params)
    direction = check_direction(params, direction)
    listed = None if batches is None else list(batches)
    random = RandomState(params)

    def composed(at: Tensors, *batch: Any) -> Any:
        return output_loss_fn(model_fn(at, *batch), *batch)

    whole = directional(composed, params, direction, batches=listed)
    outputs, moves = {}, {}
    with random.replayed(), sdpa_kernel(SDPBackend.MATH):
        for index, batch in enumerate([()] if listed is None else [(item,) for item in listed]):
            outputs[str(index)], moves[str(index)] = _moved(model_fn, params, direction, batch)
    if listed is None:
        part = directional(lambda at: output_loss_fn(at["0"]), outputs, moves).curvature
    else:
        part = directional(
            lambda at, index: output_loss_fn(at[str(index)], listed[index]), outputs, moves, batches=range(len(listed))
        ).curvature
    return GaussNewton(part, whole.curvature, part / whole.curvature if whole.curvature else math.nan)


def _moved(
    model_fn: Callable[..., Tensor], params: Tensors, direction: Tensors, batch: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    primals = {name: param.detach() for name, param in params.items()}
    with torch.no_grad():
        pair = torch.func.jvp(lambda at: model_fn(at, *batch), (primals,), (direction,))
    outputs, moves = pair[0], pair[1]
    if not isinstance(outputs, Tensor):
        raise ValueError(f"model_fn returned a {type(outputs).__name__}; one tensor of outputs is needed")
    return outputs.detach(), moves.detach()


def block_shares(
    loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    *,
    batches: Iterable[Any] | None = None,
    block: Callable[[str], str] | int = 2,
) -> dict[str, float]:
    """Compute u_b·(Hu)_b of every block b of parameters; they add up to uᵀHu, and hold b's coupling with all the others
    (a share may be negative).

    ``block``: a function from a parameter's name to its block's, or how many leading dotted parts of the name make one
    ("blocks.0.mixer.qkv.weight" at 2 belongs to "blocks.0"). One Hessian-vector product. Source: uᵀHu = Σ_b u_bᵀ(Hu)_b,
    by definition.
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
    """The noise scale of a gradient. ``value``: B_simple = trace / gradient_sq, in the unit that the counts count; inf
    where gradient_sq came out ≤ 0 (the noise hides the gradient). ``trace``: tr Σ of one item's gradient.
    ``gradient_sq``: |G|². Both without bias, from ``microbatches`` of them."""

    value: float
    trace: float
    gradient_sq: float
    microbatches: int


def gradient_noise_scale(
    loss_fn: Callable[..., Any], params: Mapping[str, Tensor], batches: Iterable[Any]
) -> NoiseScale:
    """Estimate the simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1) from the gradients of
    microbatches.

    ``loss_fn(params, batch) -> (sum, count)``, b_i = count. E|g_i|² = |G|² + tr Σ/b_i for a microbatch and |G|² + tr
    Σ/B for all of them together are two equations for |G|² and tr Σ; with equal counts they are the paper's. The counts
    must be of independent items (sequences, rather than their tokens). Errors: ``ValueError`` for fewer than two
    microbatches that count something.
    """
    params = check_params(params)
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    total, squares, counts = {name: torch.zeros_like(param.detach()) for name, param in params.items()}, [], []
    with RandomState(params).replayed(), torch.enable_grad():
        for value, count in Objective(loss_fn, batches).terms(leaves):
            gradients = plain_gradient(value, leaves)
            check_used(gradients)
            present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            for name, gradient in present.items():
                total[name] += gradient
            if count:
                squares.append((norm(present) / count) ** 2)
                counts.append(count)
    if len(counts) < 2:
        raise ValueError(f"a noise scale needs at least two microbatches that count something; there are {len(counts)}")
    small, large = sum(squares) / len(squares), (norm(total) / sum(counts)) ** 2
    inverse_small, inverse_large = sum(1 / count for count in counts) / len(counts), 1 / sum(counts)
    trace = (small - large) / (inverse_small - inverse_large)
    gradient_sq = large - trace * inverse_large
    value = trace / gradient_sq if gradient_sq > 0 else math.nan if math.isnan(gradient_sq) else math.inf
    return NoiseScale(value, trace, gradient_sq, len(counts))
