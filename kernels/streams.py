"""Compute residual connections with several streams, X (T tokens, N streams, C channels).

`read_gated` (mHC, mHC-lite; Xie et al. 2025, arXiv:2512.24880; Yang & Gao 2026, arXiv:2601.05732) and `read_hyper`
(hyper-connections; Zhu et al. 2024, arXiv:2409.19606) compute a token's coefficients and its branch's input u = Σ_s
pre_s X_s; `join` adds the branch's output: X' = mixᵀX + post ⊗ F. Coefficients (T, N, N + 2) are float32 or wider, with
pre_s, mix_s1 … mix_sN and post_s in row s; X, u and F are float64, float32, bfloat16 or float16.

Each has an exact first derivative (Sinkhorn and Knopp's iterations one by one) and a rule for second order along a
line; both are reproducible. The reading operations return X as their third result: a `join` with this X gets its total
gradient in one pass.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor

from kernels._streams_join_operation import join
from kernels._streams_launch import (
    MOST_PERMUTATIONS,
    TAYLOR_WARPS,
    Shape,
    allocate_three,
    choose_accumulator,
    dense,
    empty,
    fill_missing,
    launch,
    require,
)
from kernels._streams_read import read_gated as gated_kernel
from kernels._streams_read import read_hyper as hyper_kernel
from kernels._streams_read_backward import gated_logits_backward, hyper_logits_backward, read_backward
from kernels._streams_read_taylor import read_gated_taylor, read_hyper_taylor
from kernels.operation import Component, Operation, Parts

__all__ = ["join", "read_gated", "read_hyper"]


def _gated_shape(x_TSC: Tensor, weight_GO: Tensor, p_RM: Tensor | None, iterations: int) -> Shape:
    tokens, streams, width = x_TSC.shape
    options = weight_GO.shape[1] - 2 * streams
    expected = streams**2 if p_RM is None else len(p_RM)
    if options != expected or weight_GO.shape[0] != streams * width:
        raise ValueError(f"weight {tuple(weight_GO.shape)}: give {(streams * width, 2 * streams + expected)}")
    if p_RM is not None and options > MOST_PERMUTATIONS:
        raise ValueError(f"{options} permutations: the kernels take {MOST_PERMUTATIONS}; use impl=reference")
    if p_RM is None and iterations < 1:
        raise ValueError(f"iterations={iterations} of Sinkhorn and Knopp: give 1 or more")
    return Shape(tokens, streams, width, options, p_RM is not None)


def _read_constants(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "N": shape.streams,
        "NP": shape.padded_streams,
        "BLOCK_T": shape.block_tokens,
        "BLOCK_C": shape.block_width,
        "WIDE": dtype == torch.float64,
    }


def _gated_constants(shape: Shape, dtype: torch.dtype, iterations: int) -> dict[str, Any]:
    gates = max(16, triton.next_power_of_2(2 * shape.streams))
    mixing = {"GP": gates, "RP": shape.padded_options, "K": iterations, "LITE": shape.lite}
    return _read_constants(shape, dtype) | mixing


def _gated_forward(
    x_TSC: Tensor,
    weight_GO: Tensor,
    bias_O: Tensor,
    p_RM: Tensor | None,
    *,
    iterations: int = 0,
    precision: str = "ieee",
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    require(x_TSC, (weight_GO, bias_O), precision)
    shape, dtype = _gated_shape(x_TSC, weight_GO, p_RM, iterations), choose_accumulator(x_TSC)
    x, weight, bias, p = dense(x_TSC, weight_GO, bias_O, bias_O if p_RM is None else p_RM)
    u = empty(x, shape.tokens, shape.width)
    coefficients = empty(x, shape.tokens, shape.streams, shape.streams + 2, dtype=dtype)
    z, root = empty(x, shape.tokens, shape.outputs, dtype=dtype), empty(x, shape.tokens, dtype=dtype)
    launch(
        gated_kernel,
        (shape.read_programs,),
        *(x, weight, bias, p, u, coefficients, z, root),
        *(shape.tokens, shape.width, shape.options, torch.finfo(dtype).eps),
        **_gated_constants(shape, dtype, iterations),
        PRECISION=precision,
    )
    return (u, coefficients, x_TSC), (coefficients, z, root)


def _gated_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    needed: Any,
    saved: tuple[Tensor, ...],
    x_TSC: Tensor,
    weight_GO: Tensor,
    bias_O: Tensor,
    p_RM: Tensor | None,
    *,
    iterations: int = 0,
    precision: str = "ieee",
) -> tuple[Component, ...]:
    coefficients, z, root = saved
    shape, dtype = _gated_shape(x_TSC, weight_GO, p_RM, iterations), choose_accumulator(x_TSC)
    x, weight, bias, p = dense(x_TSC, weight_GO, bias_O, bias_O if p_RM is None else p_RM)
    du, d_coefficients, through = dense(*gradients)
    dz, along = empty(z, *z.shape), empty(z, shape.tokens)
    room = 2 * iterations * shape.padded_streams * shape.block_tokens
    launch(
        gated_logits_backward,
        (shape.read_programs,),
        *(x, du, coefficients, d_coefficients, z, bias, p, dz, along),
        along if shape.lite else empty(z, shape.read_programs * room),
        *(shape.tokens, shape.width, shape.options),
        **_gated_constants(shape, dtype, iterations),
    )
    dx, d_weight = _read_backward(shape, x, weight, dz, root, along, du, coefficients, through, precision)
    return dx, d_weight.sum(0), dz.sum(0), None


def _read_backward(
    shape: Shape,
    x: Tensor,
    weight: Tensor,
    dz: Tensor,
    root: Tensor,
    along: Tensor,
    du: Tensor,
    coefficients: Tensor,
    through: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradient by X, and partial gradients by the weights (P, N·C, O)."""
    dx = empty(x, *x.shape)
    d_weight = empty(root, shape.parts, shape.streams * shape.width, shape.outputs)
    launch(
        read_backward,
        (shape.column_programs, shape.parts),
        *(x, weight, dz, root, along, du, coefficients, through, dx, d_weight),
        *(shape.tokens, shape.width, shape.outputs, shape.part_tokens),
        N=shape.streams,
        PER_STREAM=not shape.options,
        OP=shape.padded_outputs,
        BLOCK_T=32,
        BLOCK_C=shape.block_width,
        WIDE=root.dtype == torch.float64,
        PRECISION=precision,
    )
    return dx, d_weight


def _hyper_shape(x_TSC: Tensor, weight_CO: Tensor) -> Shape:
    tokens, streams, width = x_TSC.shape
    if tuple(weight_CO.shape) != (width, streams + 2):
        raise ValueError(f"weight {tuple(weight_CO.shape)}: give {(width, streams + 2)}")
    return Shape(tokens, streams, width)


def _hyper_forward(
    x_TSC: Tensor, weight_CO: Tensor, static_SO: Tensor, amplitude_O: Tensor, *, precision: str = "ieee"
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    require(x_TSC, (weight_CO, static_SO, amplitude_O), precision)
    shape, dtype = _hyper_shape(x_TSC, weight_CO), choose_accumulator(x_TSC)
    x, weight, static, amplitude = dense(x_TSC, weight_CO, static_SO, amplitude_O)
    u = empty(x, shape.tokens, shape.width)
    coefficients = empty(x, shape.tokens, shape.streams, shape.outputs, dtype=dtype)
    z, root = torch.empty_like(coefficients), empty(x, shape.tokens, shape.streams, dtype=dtype)
    launch(
        hyper_kernel,
        (shape.read_programs,),
        *(x, weight, static, amplitude, u, coefficients, z, root),
        *(shape.tokens, shape.width, torch.finfo(dtype).eps),
        **_read_constants(shape, dtype),
        OP=shape.padded_outputs,
        PRECISION=precision,
    )
    return (u, coefficients, x_TSC), (coefficients, z, root)


def _hyper_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    needed: Any,
    saved: tuple[Tensor, ...],
    x_TSC: Tensor,
    weight_CO: Tensor,
    static_SO: Tensor,
    amplitude_O: Tensor,
    *,
    precision: str = "ieee",
) -> tuple[Component, ...]:
    coefficients, z, root = saved
    shape, dtype = _hyper_shape(x_TSC, weight_CO), choose_accumulator(x_TSC)
    x, weight, amplitude = dense(x_TSC, weight_CO, amplitude_O)
    du, d_coefficients, through = dense(*gradients)
    total, dz, along = empty(z, *z.shape), empty(z, *z.shape), empty(z, *root.shape)
    launch(
        hyper_logits_backward,
        (shape.read_programs,),
        *(x, du, d_coefficients, z, amplitude, total, dz, along),
        *(shape.tokens, shape.width),
        **_read_constants(shape, dtype),
        OP=shape.padded_outputs,
    )
    dx, d_weight = _read_backward(shape, x, weight, dz, root, along, du, coefficients, through, precision)
    by_stream = d_weight.unflatten(1, (shape.streams, shape.width)).sum((0, 1))
    return dx, by_stream, total.sum(0), (total * z.tanh()).sum((0, 1))


def _gated_second_order(
    x: Parts, weight: Parts, bias: Parts, p: Parts, *, iterations: int = 0, precision: str = "ieee"
) -> tuple[Parts, Parts, Parts]:
    """Return u, the coefficients and X with two derivatives along a line."""
    (value, *_), (w, *_), (b, *_) = given = [fill_missing(part) for part in (x, weight, bias)]
    require(value, (w, b), precision)
    shape, dtype = _gated_shape(value, w, p[0], iterations), choose_accumulator(value)
    u = allocate_three(value, shape.tokens, shape.width)
    coefficients = allocate_three(b, shape.tokens, shape.streams, shape.streams + 2)
    launch(
        read_gated_taylor,
        (shape.read_programs,),
        *(*chain(*given), b if p[0] is None else p[0].contiguous()),
        *(*u, *coefficients, shape.tokens, shape.width, shape.options, torch.finfo(dtype).eps),
        **_gated_constants(shape, dtype, iterations),
        PRECISION=precision,
        num_warps=TAYLOR_WARPS,
    )
    return u, coefficients, x


def _hyper_second_order(
    x: Parts, weight: Parts, static: Parts, amplitude: Parts, *, precision: str = "ieee"
) -> tuple[Parts, Parts, Parts]:
    """Return u, the coefficients and X with two derivatives along a line."""
    (value, *_), (w, *_), (s, *_), (a, *_) = given = [fill_missing(part) for part in (x, weight, static, amplitude)]
    require(value, (w, s, a), precision)
    shape, dtype = _hyper_shape(value, w), choose_accumulator(value)
    u = allocate_three(value, shape.tokens, shape.width)
    coefficients = allocate_three(w, shape.tokens, shape.streams, shape.outputs)
    launch(
        read_hyper_taylor,
        (shape.read_programs,),
        *chain(*given),
        *(*u, *coefficients, shape.tokens, shape.width, torch.finfo(dtype).eps),
        **_read_constants(shape, dtype),
        OP=shape.padded_outputs,
        PRECISION=precision,
        num_warps=TAYLOR_WARPS,
    )
    return u, coefficients, x


read_gated = Operation("read_gated", _gated_forward, _gated_backward, _gated_second_order)
"""read_gated(x (T, N, C), weight (N·C, 2N + R), bias (2N + R,), p (R, N²) or None, iterations=K, precision=…) -> u (T,
C), coefficients (T, N, N + 2), x. The logits are RMSNorm(vec x) W + bias; pre = σ, post = 2σ; mix = Σ_r softmax_r P_r,
or, without permutation matrices, exp of the logits after K iterations of Sinkhorn and Knopp."""

read_hyper = Operation("read_hyper", _hyper_forward, _hyper_backward, _hyper_second_order)
"""read_hyper(x (T, N, C), weight (C, N + 2), static (N, N + 2), amplitude (N + 2,), precision=…) -> u (T, C),
coefficients (T, N, N + 2), x. The coefficients are static + amplitude·tanh(RMSNorm(x_s) W) of each stream."""
