"""The residual connection of several streams, X (T tokens, N streams, C channels), in two operations.

`read_gated` (mHC, mHC-lite; Xie et al. 2025, arXiv:2512.24880; Yang & Gao 2026, arXiv:2601.05732) and `read_hyper`
(hyper-connections; Zhu et al. 2024, arXiv:2409.19606) compute a token's coefficients and what its branch reads, u = Σ_s
pre_s X_s; `join` adds what the branch gives: X' = mixᵀX + post ⊗ F. Coefficients are (T, N, N + 2) numbers of float32 or
wider, pre_s, mix_s1 … mix_sN and post_s in row s; X, u and F are float64, float32, bfloat16 or float16.

Each has its first derivative, exactly (Sinkhorn and Knopp's iterations one by one), and a rule that carries it to
second order along a line; both are the same from run to run. The reading operations give X back as their third result:
whoever joins it there has the gradients by all that read X added up while they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels._streams_join import join as join_kernel
from kernels._streams_join import join_backward, join_taylor
from kernels._streams_read import read_gated as gated_kernel
from kernels._streams_read import read_hyper as hyper_kernel
from kernels._streams_read_backward import gated_logits_backward, hyper_logits_backward, read_backward
from kernels._streams_read_taylor import read_gated_taylor, read_hyper_taylor
from kernels.operation import Component, Operation, Parts

MOST_STREAMS = 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = ("ieee", "tf32", "tf32x3")  # of float32 products with the weights


@dataclass(frozen=True)
class Shape:
    """The sizes of a connection: tokens T, streams N, channels C and logits of the mixing R (0: hyper-connections); and
    how they are padded and cut into blocks.

    Blocks are chosen for 128 threads and tiles that fit their registers; they do not depend on the device, and neither
    do results.
    """

    tokens: int
    streams: int
    width: int
    options: int = 0
    lite: bool = False

    @property
    def outputs(self) -> int:
        """The number of logits of a token, or of each of its streams (hyper-connections)."""
        return 2 * self.streams + self.options if self.options else self.streams + 2

    @property
    def padded_streams(self) -> int:
        return max(4, triton.next_power_of_2(self.streams))

    @property
    def padded_outputs(self) -> int:
        return max(16, triton.next_power_of_2(self.outputs))

    @property
    def padded_options(self) -> int:
        return max(16, triton.next_power_of_2(self.options)) if self.lite else self.padded_streams**2

    @property
    def block_tokens(self) -> int:
        """The tokens of a program that reads; all streams of a token are rows of a product in hyper-connections."""
        return 32 if self.options else 32 // self.padded_streams

    @property
    def read_programs(self) -> int:
        return triton.cdiv(self.tokens, self.block_tokens)

    @property
    def block_width(self) -> int:
        return min(128 // self.padded_streams, max(16, triton.next_power_of_2(self.width)))

    @property
    def join_tokens(self) -> int:
        return 16 // self.padded_streams

    @property
    def join_width(self) -> int:
        return min(64, triton.next_power_of_2(self.width))

    @property
    def column_programs(self) -> int:
        """The number of blocks of channels, of all streams."""
        return self.streams * triton.cdiv(self.width, self.block_width)

    @property
    def parts(self) -> int:
        """The number of parts of the tokens whose gradients by the weights are added up apart: enough programs for a GPU,
        not so many that the parts are more than X."""
        return max(1, min(triton.cdiv(self.tokens, 256), triton.cdiv(1024, self.column_programs)))

    @property
    def part_tokens(self) -> int:
        return triton.cdiv(self.tokens, self.parts)


def _accumulating(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, unless there is nothing for it to do."""
    if all(grid):
        kernel[grid](*arguments, **constants)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _require(x_TSC: Tensor, accumulated: tuple[Tensor, ...], precision: str = "ieee") -> None:
    """Raise a ``ValueError`` for what the kernels cannot take. ``accumulated``: must have the dtype of sums."""
    if x_TSC.dtype not in DTYPES:
        raise ValueError(f"streams of {x_TSC.dtype}: the kernels take float64, float32, bfloat16 and float16")
    if not 1 <= x_TSC.shape[1] <= MOST_STREAMS:
        raise ValueError(f"{x_TSC.shape[1]} streams: the kernels take 1 to {MOST_STREAMS}; use impl=reference")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(PRECISIONS)}")
    for tensor in accumulated:
        if tensor.dtype != _accumulating(x_TSC):
            raise ValueError(f"weights and coefficients of {tensor.dtype}: give {_accumulating(x_TSC)}")


def _gated_shape(x_TSC: Tensor, weight_GO: Tensor, p_RM: Tensor | None) -> Shape:
    tokens, streams, width = x_TSC.shape
    options = weight_GO.shape[1] - 2 * streams
    expected = streams**2 if p_RM is None else len(p_RM)
    if options != expected or weight_GO.shape[0] != streams * width:
        raise ValueError(f"weight {tuple(weight_GO.shape)}: give {(streams * width, 2 * streams + expected)}")
    return Shape(tokens, streams, width, options, p_RM is not None)


def _read_constants(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        N=shape.streams,
        NP=shape.padded_streams,
        BLOCK_T=shape.block_tokens,
        BLOCK_C=shape.block_width,
        WIDE=dtype == torch.float64,
    )


def _gated_constants(shape: Shape, dtype: torch.dtype, iterations: int) -> dict[str, Any]:
    gates = max(16, triton.next_power_of_2(2 * shape.streams))
    mixing = dict(GP=gates, RP=shape.padded_options, K=iterations, LITE=shape.lite)
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
    _require(x_TSC, (weight_GO, bias_O), precision)
    shape, dtype = _gated_shape(x_TSC, weight_GO, p_RM), _accumulating(x_TSC)
    x, weight, bias, p = _dense(x_TSC, weight_GO, bias_O, bias_O if p_RM is None else p_RM)
    u = _empty(x, shape.tokens, shape.width)
    coefficients = _empty(x, shape.tokens, shape.streams, shape.streams + 2, dtype=dtype)
    z, root = _empty(x, shape.tokens, shape.outputs, dtype=dtype), _empty(x, shape.tokens, dtype=dtype)
    _launch(
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
    shape, dtype = _gated_shape(x_TSC, weight_GO, p_RM), _accumulating(x_TSC)
    x, weight, bias, p = _dense(x_TSC, weight_GO, bias_O, bias_O if p_RM is None else p_RM)
    du, d_coefficients, through = _dense(*gradients)
    dz, along = _empty(z, *z.shape), _empty(z, shape.tokens)
    room = 0 if shape.lite else 2 * iterations * shape.padded_streams * shape.block_tokens
    _launch(
        gated_logits_backward,
        (shape.read_programs,),
        *(x, du, coefficients, d_coefficients, z, bias, p, dz, along),
        _empty(z, max(1, shape.read_programs * room)),
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
    """Return the gradients by X and, in parts (P, N·C, O) to be added up, by the weights."""
    dx = _empty(x, *x.shape)
    d_weight = _empty(root, shape.parts, shape.streams * shape.width, shape.outputs)
    _launch(
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
    _require(x_TSC, (weight_CO, static_SO, amplitude_O), precision)
    shape, dtype = _hyper_shape(x_TSC, weight_CO), _accumulating(x_TSC)
    x, weight, static, amplitude = _dense(x_TSC, weight_CO, static_SO, amplitude_O)
    u = _empty(x, shape.tokens, shape.width)
    coefficients = _empty(x, shape.tokens, shape.streams, shape.outputs, dtype=dtype)
    z, root = torch.empty_like(coefficients), _empty(x, shape.tokens, shape.streams, dtype=dtype)
    _launch(
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
    shape, dtype = _hyper_shape(x_TSC, weight_CO), _accumulating(x_TSC)
    x, weight, amplitude = _dense(x_TSC, weight_CO, amplitude_O)
    du, d_coefficients, through = _dense(*gradients)
    total, dz, along = _empty(z, *z.shape), _empty(z, *z.shape), _empty(z, *root.shape)
    _launch(
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


def _filled(parts: Parts) -> list[Tensor]:
    """Return value and derivatives, laid out densely and all of one dtype, zeros for what is None."""
    value = parts[0].contiguous()
    return [value, *(torch.zeros_like(value) if part is None else part.contiguous() for part in parts[1:])]


def _like(tensor: Tensor, *shape: int) -> list[Tensor]:
    return [_empty(tensor, *shape) for _ in range(3)]


def _gated_second_order(
    x: Parts, weight: Parts, bias: Parts, p: Parts, *, iterations: int = 0, precision: str = "ieee"
) -> tuple[Parts, Parts, Parts]:
    """Return u, the coefficients and X with their derivatives along a line."""
    _require(x[0], (weight[0], bias[0]), precision)
    shape, dtype = _gated_shape(x[0], weight[0], p[0]), _accumulating(x[0])
    u, (b, *_) = _like(x[0], shape.tokens, shape.width), _filled(bias)
    coefficients = _like(b, shape.tokens, shape.streams, shape.streams + 2)
    _launch(
        read_gated_taylor,
        (shape.read_programs,),
        *(*_filled(x), *_filled(weight), *_filled(bias), b if p[0] is None else p[0].contiguous()),
        *(*u, *coefficients, shape.tokens, shape.width, shape.options, torch.finfo(dtype).eps),
        **_gated_constants(shape, dtype, iterations),
        PRECISION=precision,
    )
    return tuple(u), tuple(coefficients), x


def _hyper_second_order(
    x: Parts, weight: Parts, static: Parts, amplitude: Parts, *, precision: str = "ieee"
) -> tuple[Parts, Parts, Parts]:
    """Return u, the coefficients and X with their derivatives along a line."""
    _require(x[0], (weight[0], static[0], amplitude[0]), precision)
    shape, dtype = _hyper_shape(x[0], weight[0]), _accumulating(x[0])
    u = _like(x[0], shape.tokens, shape.width)
    coefficients = _like(weight[0], shape.tokens, shape.streams, shape.outputs)
    _launch(
        read_hyper_taylor,
        (shape.read_programs,),
        *(*_filled(x), *_filled(weight), *_filled(static), *_filled(amplitude)),
        *(*u, *coefficients, shape.tokens, shape.width, torch.finfo(dtype).eps),
        **_read_constants(shape, dtype),
        OP=shape.padded_outputs,
        PRECISION=precision,
    )
    return tuple(u), tuple(coefficients), x


def _join_constants(shape: Shape, by_differences: bool) -> dict[str, Any]:
    return dict(
        N=shape.streams,
        NP=shape.padded_streams,
        BLOCK_T=shape.join_tokens,
        BLOCK_C=shape.join_width,
        DIFFERENCES=by_differences,
    )


def _join_shape(x_TSC: Tensor, coefficients_TSK: Tensor, added_TC: Tensor) -> Shape:
    tokens, streams, width = x_TSC.shape
    _require(x_TSC, (coefficients_TSK,))
    if coefficients_TSK.shape != (tokens, streams, streams + 2) or added_TC.shape != (tokens, width):
        given = f"coefficients {tuple(coefficients_TSK.shape)} and added {tuple(added_TC.shape)}"
        raise ValueError(f"{given}: give {(tokens, streams, streams + 2)} and {(tokens, width)}")
    return Shape(tokens, streams, width)


def _join_grid(shape: Shape) -> tuple[int, int]:
    return triton.cdiv(shape.tokens, shape.join_tokens), triton.cdiv(shape.width, shape.join_width)


def _join_forward(
    x_TSC: Tensor, coefficients_TSK: Tensor, added_TC: Tensor, *, by_differences: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    shape = _join_shape(x_TSC, coefficients_TSK, added_TC)
    x, coefficients, added = _dense(x_TSC, coefficients_TSK, added_TC)
    out = _empty(x, *x.shape)
    arguments = (x, coefficients, added, out, shape.tokens, shape.width)
    _launch(join_kernel, _join_grid(shape), *arguments, **_join_constants(shape, by_differences))
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
    x, coefficients, added, gradient = _dense(x_TSC, coefficients_TSK, added_TC, gradient)
    found = [_empty(tensor, *tensor.shape) for tensor in (x, coefficients, added)]
    arguments = (x, coefficients, added, gradient, *found, shape.tokens, shape.width)
    _launch(join_backward, _join_grid(shape)[:1], *arguments, **_join_constants(shape, by_differences))
    return tuple(found)


def _join_second_order(x: Parts, coefficients: Parts, added: Parts, *, by_differences: bool) -> Parts:
    shape = _join_shape(x[0], coefficients[0], added[0])
    out = _like(x[0], *x[0].shape)
    arguments = (*_filled(x), *_filled(coefficients), *_filled(added), *out, shape.tokens, shape.width)
    _launch(join_taylor, _join_grid(shape), *arguments, **_join_constants(shape, by_differences))
    return tuple(out)


read_gated = Operation("read_gated", _gated_forward, _gated_backward, _gated_second_order)
"""read_gated(x (T, N, C), weight (N·C, 2N + R), bias (2N + R,), p (R, N²) or None, iterations=K, precision=…) -> u (T, C),
coefficients (T, N, N + 2), x. The logits are RMSNorm(vec x) W + bias; pre = σ, post = 2σ; mix = Σ_r softmax_r P_r, or,
without permutation matrices, exp of the logits after K iterations of Sinkhorn and Knopp."""

read_hyper = Operation("read_hyper", _hyper_forward, _hyper_backward, _hyper_second_order)
"""read_hyper(x (T, N, C), weight (C, N + 2), static (N, N + 2), amplitude (N + 2,), precision=…) -> u (T, C),
coefficients (T, N, N + 2), x. The coefficients are static + amplitude·tanh(RMSNorm(x_s) W) of each stream."""

join = Operation("join", _join_forward, _join_backward, _join_second_order)
"""join(x (T, N, C), coefficients (T, N, N + 2), added (T, C), by_differences=…) -> x' (T, N, C). By differences it takes the
columns of mix to sum to 1, and keeps equal streams exactly."""
