"""Define the operation to join a branch's output to several residual streams."""

from __future__ import annotations

from itertools import chain
from typing import Any

import triton
from torch import Tensor

from kernels._streams_join import join as join_kernel
from kernels._streams_join import join_backward, join_taylor
from kernels._streams_launch import Shape, allocate_three, dense, empty, fill_missing, launch, require
from kernels.operation import Component, Operation, Parts


def _join_constants(shape: Shape, by_differences: bool) -> dict[str, Any]:
    return {
        "N": shape.streams,
        "NP": shape.padded_streams,
        "BLOCK_T": 1,
        "BLOCK_C": shape.join_width,
        "DIFFERENCES": by_differences,
        "num_warps": 1,
    }


def _join_shape(x_TSC: Tensor, coefficients_TSK: Tensor, added_TC: Tensor) -> Shape:
    tokens, streams, width = x_TSC.shape
    require(x_TSC, (coefficients_TSK,))
    if coefficients_TSK.shape != (tokens, streams, streams + 2) or added_TC.shape != (tokens, width):
        given = f"coefficients {tuple(coefficients_TSK.shape)} and added {tuple(added_TC.shape)}"
        raise ValueError(f"{given}: give {(tokens, streams, streams + 2)} and {(tokens, width)}")
    return Shape(tokens, streams, width)


def _join_grid(shape: Shape) -> tuple[int, int]:
    return shape.tokens, triton.cdiv(shape.width, shape.join_width)


def _join_forward(
    x_TSC: Tensor, coefficients_TSK: Tensor, added_TC: Tensor, *, by_differences: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    shape = _join_shape(x_TSC, coefficients_TSK, added_TC)
    x, coefficients, added = dense(x_TSC, coefficients_TSK, added_TC)
    out = empty(x, *x.shape)
    arguments = (x, coefficients, added, out, shape.tokens, shape.width)
    launch(join_kernel, _join_grid(shape), *arguments, **_join_constants(shape, by_differences))
    return out, ()


def _join_backward(
    gradient: Tensor,
    needed: Any,
    saved: tuple[Tensor, ...],
    x_TSC: Tensor,
    coefficients_TSK: Tensor,
    added_TC: Tensor,
    *,
    by_differences: bool,
) -> tuple[Component, ...]:
    shape = _join_shape(x_TSC, coefficients_TSK, added_TC)
    x, coefficients, added, gradient = dense(x_TSC, coefficients_TSK, added_TC, gradient)
    found = [empty(tensor, *tensor.shape) for tensor in (x, coefficients, added)]
    arguments = (x, coefficients, added, gradient, *found, shape.tokens, shape.width)
    launch(join_backward, _join_grid(shape)[:1], *arguments, **_join_constants(shape, by_differences))
    return tuple(found)


def _join_second_order(x: Parts, coefficients: Parts, added: Parts, *, by_differences: bool) -> Parts:
    (value, *_), (k, *_), (plus, *_) = given = [fill_missing(part) for part in (x, coefficients, added)]
    shape, out = _join_shape(value, k, plus), allocate_three(value, *value.shape)
    arguments = (*chain(*given), *out, shape.tokens, shape.width)
    constants = _join_constants(shape, by_differences) | {"num_warps": 2}  # three tiles are too many for a warp
    launch(join_taylor, _join_grid(shape), *arguments, **constants)
    return out


join = Operation("join", _join_forward, _join_backward, _join_second_order)
"""join(x (T, N, C), coefficients (T, N, N + 2), added (T, C), by_differences=…) -> x' (T, N, C). By differences it
takes the columns of mix to sum to 1, and keeps equal streams exactly."""
