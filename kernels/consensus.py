"""Compute consensus' flow and its gradients in Triton, without stored edge weights.

For directed edges i → j, with hidden = GELU(source_i + target_j), R = α I + Σ_p β/(r‖Λ_p‖²) Λ_pᵀ Λ_p from Algorithm 2
(Eq. 36; a zero row is not normalised), with α, β = softplus(W_s·hidden + b_s) and Λ = W_Λ·hidden + b_Λ:

- `self_consensus`: g_i = Σ_j (R_ij + R_ji)(u_i − u_j) over 0 < |i − j| ≤ w, the window-path graph.
- `cross_consensus`: g_i = Σ_j R_ij(u_i − v_j) over |i − j| ≤ w, including i itself, or over the whole context.

A ``turn`` rotates the disagreement of i → j back by its target's rotation: g_i = Σ_j (R_ij ρ(j)ᵀ + R_ji ρ(i)ᵀ)(u_i −
u_j) and g_i = Σ_j R_ij ρ(j)ᵀ(u_i − v_j). For signals rotated by ρ these are relative disagreements, ρ(i − j)u_i − u_j.
``turn`` (2, K, J) holds [cos; cos] and [−sin; sin] of every target's angles, without a gradient.

The step u − η·g, rotations and products per node are computed by torch. Axes: H heads, K head width, B batch, N
positions, J context positions, X = ξ hidden features per edge, S = 2 scalars α, β (1 at rank 0), Y = r·K. Features lead
and nodes are contiguous. A tile of nodes with w more before it holds every pair with a node in the tile: each edge is
computed once, except twice in w of a tile's M rows. Nothing is added by atomics, so results are reproducible.
Backward and second order recompute the edge weights. The gradient by W_Λ is a product over edges, computed by torch in
chunks of edges (`CHUNK_BYTES`).

``precision`` of products with W_Λ: "ieee" and "tf32x3" retain float32; "tf32" and "bf16" round the factors and sum in
float32. All else is float32, or float64 for float64 inputs. Sizes: w ≤ 16, r ≤ 16, ξ ≤ 256, K ≤ 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import _consensus_passes as passes
from kernels._consensus_launch import LARGEST, Ends, Network, Tiles, check_inputs, chunk_sizes, tiles_of
from kernels.operation import Component, Operation, Parts

__all__ = ["LARGEST", "Tiles", "chunk_sizes", "cross_consensus", "self_consensus", "tiles_of"]

Given = tuple[Ends, Network]


def _pack_self(nodes: Any, network: Any, constants: Any, window: int) -> Given:
    (u, source, target), (mask, turn) = nodes, _optional(constants, 2)
    return Ends(u, u, source, target, mask, mask, True, window, turn), Network(*network)


def _self_forward(
    u_HKBN: Tensor,
    source_HXBN: Tensor,
    target_HXBN: Tensor,
    scalar_weight_HSX: Tensor,
    scalar_bias_HS: Tensor,
    lambda_weight_HYX: Tensor | None,
    lambda_bias_HY: Tensor | None,
    mask_BN: Tensor | None,
    turn_2KN: Tensor | None = None,
    *,
    window: int,
    precision: str = "ieee",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    network = (scalar_weight_HSX, scalar_bias_HS, lambda_weight_HYX, lambda_bias_HY)
    given = check_inputs(
        *_pack_self((u_HKBN, source_HXBN, target_HXBN), network, (mask_BN, turn_2KN), window), precision
    )
    return passes.flow(*given, precision), ()


def _self_backward(gradient, needed, saved, u, source, target, *rest, window, precision="ieee") -> list[Component]:
    ends, network = check_inputs(*_pack_self((u, source, target), rest[:4], rest[4:], window), precision)
    found: list[Any] = [None] * len(needed)
    gradient = gradient.contiguous()
    if any(needed[:3]):
        found[:3] = passes.compute_end_gradients(gradient, ends, network, precision)
    if any(needed[3:7]):
        found[3:7] = passes.compute_network_gradients(gradient, ends, network, precision)
    return found


def _self_second_order(u, source, target, *rest, window, precision="ieee") -> Parts:
    nodes, constants = [_fill_missing(each) for each in (u, source, target)], [each[0] for each in rest[4:]]
    orders = [
        _pack_self([node[order] for node in nodes], [each[order] for each in rest[:4]], constants, window)
        for order in range(3)
    ]
    return _differentiate(orders, precision)


def _pack_cross(nodes: Any, network: Any, constants: Any, window: int | None) -> Given:
    (u, v, source, target), (mask, context_mask, turn) = nodes, _optional(constants, 3)
    return Ends(u, v, source, target, mask, context_mask, False, window, turn), Network(*network)


def _cross_forward(
    u_HKBN: Tensor,
    v_HKBJ: Tensor,
    source_HXBN: Tensor,
    target_HXBJ: Tensor,
    scalar_weight_HSX: Tensor,
    scalar_bias_HS: Tensor,
    lambda_weight_HYX: Tensor | None,
    lambda_bias_HY: Tensor | None,
    mask_BN: Tensor | None,
    context_mask_BJ: Tensor | None,
    turn_2KJ: Tensor | None = None,
    *,
    window: int | None,
    precision: str = "ieee",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    nodes = (u_HKBN, v_HKBJ, source_HXBN, target_HXBJ)
    network = (scalar_weight_HSX, scalar_bias_HS, lambda_weight_HYX, lambda_bias_HY)
    given = check_inputs(*_pack_cross(nodes, network, (mask_BN, context_mask_BJ, turn_2KJ), window), precision)
    return passes.flow(*given, precision), ()


def _cross_backward(gradient, needed, saved, *tensors, window, precision="ieee") -> list[Component]:
    ends, network = check_inputs(*_pack_cross(tensors[:4], tensors[4:8], tensors[8:], window), precision)
    found: list[Any] = [None] * len(needed)
    gradient = gradient.contiguous()
    if needed[0] or needed[2]:
        found[0], found[2], _ = passes.compute_end_gradients(gradient, ends, network, precision)
    if needed[1] or needed[3]:
        found[1], found[3], _ = passes.compute_end_gradients(gradient, ends.swap(), network, precision, from_own=False)
    if any(needed[4:8]):
        found[4:8] = passes.compute_network_gradients(gradient, ends, network, precision)
    return found


def _cross_second_order(*parts, window, precision="ieee") -> Parts:
    nodes, constants = [_fill_missing(each) for each in parts[:4]], [each[0] for each in parts[8:]]
    orders = [
        _pack_cross([node[order] for node in nodes], [each[order] for each in parts[4:8]], constants, window)
        for order in range(3)
    ]
    return _differentiate(orders, precision)


def _optional(given: Sequence[Component], number: int) -> list[Component]:
    """Return the tensors without derivatives, None for missing ones."""
    return [*given, *(number - len(given)) * [None]]


def _fill_missing(parts: Parts) -> list[Tensor]:
    """Return value and derivatives of a node tensor in equal layout."""
    value = parts[0]
    assert value is not None
    value = value.contiguous()
    return [value, *(torch.zeros_like(value) if part is None else part.contiguous() for part in parts[1:])]


def _differentiate(orders: Sequence[Given], precision: str) -> Parts:
    """Return (g, g′, g″) from `check_inputs`'s arguments with two derivatives each."""
    ends, network = check_inputs(*orders[0], precision)
    (first, by_first), (second, by_second) = orders[1:]
    return passes.flow_along((first, second), (network, by_first, by_second), ends, precision)


self_consensus = Operation("self_consensus", _self_forward, _self_backward, _self_second_order)
cross_consensus = Operation("cross_consensus", _cross_forward, _cross_backward, _cross_second_order)
