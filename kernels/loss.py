"""Compute the sums behind cross entropy and score entropy without storing the logits.

From the head's inputs and weights, by Triton kernels. For each position: the log-sum-exp of its logits z = hWᵀ + b, its
target's logit and, with a left-out column, the plain sum of the others. A cross entropy is the first minus the second;
both graphs' score entropies are functions of all three (`stability.objectives._graph`). A batch's logits are never
stored: forward keeps them on chip, backward stores a strip of the vocabulary at a time
(`kernels._loss_plan.STRIP_BYTES`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels._large_products import multiply
from kernels._loss_kernels import hidden_gradient_kernel, logit_gradient_kernel, sums_kernel
from kernels._loss_plan import Blocks, blocks_of, product_blocks_of, ranges_of, second_blocks_of, strip_of, wide
from kernels._loss_second import second_order_kernel
from kernels.availability import is_interpreted
from kernels.operation import Component, Operation, Parts

__all__ = ["Blocks", "vocabulary_sums"]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def vocabulary_sums(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    left_out_R: Tensor | None = None,
    *,
    blocks: Blocks | None = None,
) -> Tensor:
    """Return each position's log-sum-exp, target logit and optional sum, (planes, R).

    float32 or wider. Differentiable once, and twice along a line by taylor.

    Args:
        hidden_RD: the head's inputs.
        weight_VD: its weights.
        bias_V: its biases, or None. All three share one dtype: float32, bfloat16 or float64; float32 is rounded to TF32
            if torch's own products on the device are.
        targets_R: int64; NaN for a target outside the vocabulary.
        left_out_R: int64, a column excluded from log-sum-exp and sum (−1: none); None: two planes, without the sum.
        blocks: sizes per program; None: chosen by dtype.

    Raises:
        ValueError: another dtype.
    """
    dtypes = {each.dtype for each in (hidden_RD, weight_VD, bias_V) if each is not None}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        given = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"kernels.loss takes one of float32, bfloat16 and float64, and was given {given}")
    rounds = hidden_RD.is_cuda and torch.get_float32_matmul_precision() != "highest"
    precision = "tf32" if rounds and hidden_RD.dtype == torch.float32 else "ieee"
    return _sums(hidden_RD, weight_VD, bias_V, targets_R, left_out_R, precision=precision, blocks=blocks)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    left_out: Tensor | None,
    *,
    precision: str,
    blocks: Blocks | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    tensors, flags = _launch_arguments(hidden, weight, bias, targets, left_out)
    hidden, weight = tensors[:2]
    chosen, planes = blocks or blocks_of(hidden.dtype, precision), 2 if left_out is None else 3
    if not len(hidden):
        nothing = torch.zeros(planes, 0, dtype=wide(hidden.dtype), device=hidden.device)
        return nothing, (nothing[0],)
    (rows, width), columns = hidden.shape, len(weight)
    ranges, range_columns = ranges_of(rows, columns, chosen)
    found = torch.empty(planes, ranges, rows, dtype=wide(hidden.dtype), device=hidden.device)
    _launch(
        sums_kernel,
        (triton.cdiv(rows, chosen.rows), ranges),
        *(*tensors, found),
        *(rows, columns, width, hidden.stride(0), weight.stride(0), range_columns),
        **flags,
        **_constants("RVD", chosen, precision, hidden),
    )
    out = torch.cat([found[:1].logsumexp(1), found[1:].sum(1)])
    out[1].masked_fill_((targets < 0) | (targets >= columns), float("nan"))
    return out, (out[0].clone(),)


def _backward(
    gradient: Tensor,
    needed: tuple[bool, ...],
    saved: tuple[Tensor, ...],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    left_out: Tensor | None,
    *,
    precision: str,
    blocks: Blocks | None,
) -> tuple[Component, ...]:
    """Return the gradients of hidden states, weights and biases, strip by strip."""
    tensors, flags = _launch_arguments(hidden, weight, bias, targets, left_out)
    (hidden, weight), gradient = tensors[:2], gradient.contiguous()
    chosen = blocks or blocks_of(hidden.dtype, precision)
    multiplied = blocks or product_blocks_of(hidden.dtype, precision)
    (rows, width), columns, device = hidden.shape, len(weight), hidden.device
    to_head = needed[1] or needed[2]
    of_hidden = torch.empty(rows, width, dtype=wide(hidden.dtype), device=device) if needed[0] else None
    of_weight = torch.empty(columns, width, dtype=weight.dtype, device=device) if to_head else None
    of_bias = torch.empty(columns, dtype=weight.dtype, device=device) if to_head and bias is not None else None
    if not rows:
        zeros = (None if each is None else each.zero_() for each in (of_hidden, of_weight, of_bias))
        return *zeros, None, None
    constants = _constants("RVD", chosen, precision, hidden)
    to_hidden = _constants("RDV", multiplied, precision, hidden)
    strip_columns = strip_of(rows, columns, hidden.dtype.itemsize, chosen)
    # Triton's interpreter truncates to bfloat16 (a GPU rounds), and such errors add up
    strip_dtype = wide(hidden.dtype) if _is_interpreted_half(hidden) else hidden.dtype
    strip = torch.empty(rows, strip_columns, dtype=strip_dtype, device=device)
    feature_blocks = triton.cdiv(width, multiplied.columns)
    for first in range(0, columns, strip_columns):
        last = min(first + strip_columns, columns)
        _launch(
            logit_gradient_kernel,
            (triton.cdiv(rows, chosen.rows), triton.cdiv(last - first, chosen.columns)),
            *(*tensors, saved[0], gradient, strip),
            *(rows, width, hidden.stride(0), weight.stride(0), strip_columns, first, last),
            **flags,
            **constants,
        )
        if of_hidden is not None:
            _launch(
                hidden_gradient_kernel,
                (triton.cdiv(rows, multiplied.rows), feature_blocks),
                *(strip, weight, of_hidden),
                *(rows, width, weight.stride(0), strip_columns, first, last),
                IS_FIRST=first == 0,
                **to_hidden,
            )
        of_logits = strip[:, : last - first]
        if of_weight is not None:
            of_weight[first:last] = multiply(of_logits.T[None], hidden.to(strip_dtype)[None])[0]
        if of_bias is not None:
            of_bias[first:last] = of_logits.sum(0, dtype=wide(hidden.dtype))
    return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None


def _second_order(
    hidden: Parts, weight: Parts, bias: Parts, targets: Parts, left_out: Parts, *, precision: str, blocks: Blocks | None
) -> Parts:
    """Return the sums with two derivatives along a line.

    Hidden states, weights and biases move along the line.
    """
    h, w, b = ([_dense(each) for each in parts] for parts in (hidden, weight, bias))
    value, target, own = h[0], _dense(targets[0]), _dense(left_out[0])
    assert value is not None and w[0] is not None and target is not None  # only derivatives may be None
    columns = len(w[0])
    if not len(value):
        nothing, _ = _forward(value, w[0], b[0], target, own, precision=precision, blocks=blocks)
        return nothing, torch.zeros_like(nothing), torch.zeros_like(nothing)
    chosen = blocks or second_blocks_of(value.dtype, precision)
    (rows, width), planes = value.shape, 7 if own is None else 10
    ranges, range_columns = ranges_of(rows, columns, chosen)
    found = torch.empty(planes, ranges, rows, dtype=wide(value.dtype), device=value.device)
    given = {"H1": h[1], "H2": h[2], "W1": w[1], "W2": w[2], "B0": b[0], "B1": b[1], "B2": b[2]}
    _launch(
        second_order_kernel,
        (triton.cdiv(rows, chosen.rows), ranges),
        *(value if each is None else each for each in (*h, *w, *b)),
        *(target, target if own is None else own, found),
        *(rows, columns, width, width, width, range_columns),
        **{name: each is not None for name, each in given.items()},
        LEFT_OUT=own is not None,
        **_constants("RVD", chosen, precision, value),
    )
    log_sums, means, spreads, bends = found[:4]
    log_sum = log_sums.logsumexp(0)
    share = torch.where(log_sums == float("-inf"), 0.0, (log_sums - log_sum).exp())
    mean = (share * means).sum(0)
    spread = (share * (spreads + (means - mean).square())).sum(0)
    rest = found[4:].sum(1)
    rest[:3].masked_fill_((target < 0) | (target >= columns), float("nan"))
    bent = (share * bends).sum(0) + spread
    of_sums = zip((log_sum, mean, bent), rest.unflatten(0, (-1, 3)).unbind(1), strict=True)
    value, first, second = (torch.cat([of_log[None], others]) for of_log, others in of_sums)
    return value, first, second


_sums = Operation("vocabulary_sums", _forward, _backward, _second_order)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)


def _launch_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, left_out: Tensor | None
) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """Return a logit kernel's first five arguments, and flags for bias and left-out columns.

    Missing tensors are replaced by placeholders.
    """
    hidden, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (hidden, weight))
    targets = targets.contiguous()
    tensors = (
        hidden,
        weight,
        weight if bias is None else bias.contiguous(),
        targets,
        targets if left_out is None else left_out.contiguous(),
    )
    return tensors, {"HAS_BIAS": bias is not None, "LEFT_OUT": left_out is not None}


def _dense(tensor: Component) -> Component:
    return None if tensor is None else tensor.contiguous()


def _is_interpreted_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and is_interpreted()


def _constants(axes: str, blocks: Blocks, precision: str, like: Tensor) -> dict[str, Any]:
    """Return a launch's constants.

    ``axes`` are rows, columns and inner length of the kernel's product, among positions (R), vocabulary (V) and
    features (D).
    """
    sizes = {f"BLOCK_{axis}": size for axis, size in zip(axes, blocks[:3], strict=True)}
    flags = {"PRECISION": precision, "WIDEN": _is_interpreted_half(like)}
    return {**sizes, **flags, "num_warps": blocks.warps, "num_stages": blocks.stages}
