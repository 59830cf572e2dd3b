"""Compute softmax attention on a band in O(N·w), beside a few global keys.

The band is |i − j| ≤ w, or a window of positions before and after. Forward, backward, and second order along a line.
All queries see the global keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._band_backward import key_kernel, query_kernel
from kernels._band_forward import forward_kernel, taylor_kernel
from kernels._band_tiles import Tiling, tiling
from kernels.operation import Component, Operation, Parts

__all__ = ["band_attention", "operation"]

MAX_WIDTH = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def band_attention(
    q_BHMK: Tensor,
    k_BHNK: Tensor,
    v_BHNK: Tensor,
    present_BN: Tensor | None = None,
    *,
    before: int,
    after: int,
    dilation: int = 1,
    global_keys: int = 0,
    own: bool = True,
    scale: float | None = None,
    precision: str | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) v over visible keys, (B, H, M, K).

    Deterministic. Differentiable once, and to second order along a line by its own rule. Under autocast the inputs are
    cast to autocast's dtype. Sums and softmax are in float32, or float64 for float64 inputs. A query without visible
    keys gives zero.

    Args:
        q_BHMK: queries at the M = N − ``global_keys`` positions after the global keys.
        k_BHNK: keys; the first ``global_keys`` positions are visible to all queries.
        v_BHNK: values.
        present_BN: True at valid positions, the only possible keys; None: all. Padding must hold finite numbers.
        before: query i sees i + d·m for −``before`` ≤ m ≤ ``after``, d = ``dilation``.
        after: as above.
        dilation: d.
        global_keys: number of global keys.
        own: whether a position sees itself even if invalid.
        scale: factor for the scores; None: 1/√K.
        precision: of float32 products, "ieee" or "tf32"; None: as torch's matrix products on CUDA.

    Raises:
        ValueError: unsupported shapes, dtypes or head widths (1 … 128); one line.
    """
    kind = q_BHMK.device.type
    if torch.is_autocast_enabled(kind):
        q_BHMK, k_BHNK, v_BHNK = (part.to(torch.get_autocast_dtype(kind)) for part in (q_BHMK, k_BHNK, v_BHNK))
    if precision is None:
        is_tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
        precision = "tf32" if is_tf32 else "ieee"
    _check(q_BHMK, k_BHNK, v_BHNK, present_BN, before, after, dilation, global_keys, precision)
    return operation(
        q_BHMK,
        k_BHNK,
        v_BHNK,
        present_BN,
        before=before,
        after=after,
        dilation=dilation,
        global_keys=global_keys,
        own=own,
        scale=1 / math.sqrt(q_BHMK.shape[-1]) if scale is None else scale,
        precision=precision,
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor | None, before: int, after: int, dilation: int, few: int, how: str
) -> None:
    """Raise a one-line ``ValueError`` for unsupported inputs of `band_attention`."""
    batch, heads, num_queries, width = q.shape
    expected = (batch, heads, num_queries + few, width)
    if tuple(k.shape) != expected or tuple(v.shape) != expected:
        raise ValueError(
            f"band_attention: keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit queries {tuple(q.shape)} "
            f"with {few} global keys; expected {expected}"
        )
    if present is not None and (tuple(present.shape) != (batch, expected[2]) or present.dtype != torch.bool):
        raise ValueError(f"band_attention: present is {present.dtype} {tuple(present.shape)}; expected bool (B, N)")
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"band_attention: head width {width} is not within 1 … {MAX_WIDTH}; use impl=reference")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"band_attention: {q.dtype}, {k.dtype}, {v.dtype} are not one of {DTYPES}")
    if min(before, after, few) < 0 or dilation < 1 or num_queries < 1:
        raise ValueError(f"band_attention: {before=}, {after=}, {dilation=}, {few=}, {num_queries=} leave no band")
    if how not in ("ieee", "tf32"):
        raise ValueError(f"band_attention: precision={how!r}; choices: ieee, tf32")


@dataclass(frozen=True)
class _Launch:
    """A kernel launch: its grid, and the arguments after tensors and strides."""

    grid: tuple[int]
    last: dict[str, Any]

    @staticmethod
    def of(q: Tensor, present: Tensor | None, settings: dict[str, Any], num_parts: int = 1) -> _Launch:
        """Return the launch for the operation's queries and settings."""
        batch, heads, num_queries, width = q.shape
        before, after, dilation = settings["before"], settings["after"], settings["dilation"]
        sizes = tiling(before + after + 1, width, q.dtype, num_parts)
        constants = {
            "heads": heads,
            "num_queries": num_queries,
            "width": width,
            "SCALE": settings["scale"],
            "BEFORE": before,
            "AFTER": after,
            "DILATION": dilation,
            "GLOBAL": settings["global_keys"],
            "MASKED": present is not None,
            "OWN": settings["own"],
            "ROWS": sizes.rows,
            "OTHERS": sizes.others,
            "WIDTH": sizes.width,
            "PRECISION": settings["precision"],
            "ACC": tl.float64 if q.dtype == torch.float64 else tl.float32,
        }
        return _Launch((batch * heads * dilation * _blocks(num_queries, dilation, sizes),), constants | sizes.options)

    def __call__(self, kernel: Any, *tensors: Tensor, strided: Sequence[Tensor]) -> None:
        strides = [step for tensor in strided for step in tensor.stride()[:3]]
        with torch.cuda.device_of(tensors[0]):
            kernel[self.grid](*tensors, *strides, **self.last)


def _blocks(num_queries: int, dilation: int, sizes: Tiling) -> int:
    """Return the number of blocks per residue class."""
    return triton.cdiv(triton.cdiv(num_queries, dilation), sizes.rows)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous features."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x_BHNK: Tensor) -> Tensor:
    """Return an empty tensor with this shape in (B, N, H, K) memory order."""
    batch, heads, num_positions, width = x_BHNK.shape
    # the order for a layer to join its heads without a copy
    return torch.empty(batch, num_positions, heads, width, dtype=x_BHNK.dtype, device=x_BHNK.device).transpose(1, 2)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _bytes(present: Tensor | None, instead: Tensor) -> Tensor:
    """Return the mask as bytes; without a mask, a placeholder never read."""
    return instead if present is None else present.contiguous().view(torch.uint8)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor | None, **settings: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty_like(q), torch.empty(q.shape[:3], dtype=_wide(q), device=q.device)
    launch = _Launch.of(q, present, settings)
    launch(forward_kernel, q, k, v, _bytes(present, q), out, lse, strided=(q, k, v, out))
    return out, (out, lse)


def _backward(
    gradient: Tensor,
    needed: Sequence[bool],
    saved: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    present: Tensor | None,
    **settings: Any,
) -> tuple[Component, ...]:
    """Return dq, dk and dv, all three even if not needed: they share intermediate results."""
    out, lse = saved
    q, k, v, gradient = _rows(q), _rows(k), _rows(v), _rows(gradient)
    launch, few, mask = _Launch.of(q, present, settings), settings["global_keys"], _bytes(present, q)
    d_q, d_k, d_v, delta = _empty_like(q), _empty_like(k), _empty_like(v), torch.empty_like(lse)
    of_blocks = (launch.grid[0] // (q.shape[0] * q.shape[1]), few, q.shape[-1])
    k_shares, v_shares = (torch.empty(*q.shape[:2], *of_blocks, dtype=lse.dtype, device=q.device) for _ in range(2))
    tensors = (q, k, v, mask, out, lse, gradient, d_q, delta, k_shares, v_shares)
    launch(query_kernel, *tensors, strided=(q, k, v, out, gradient, d_q))
    launch(key_kernel, q, k, v, mask, lse, delta, gradient, d_k, d_v, strided=(q, k, v, gradient, d_k))
    if few:
        d_k[:, :, :few], d_v[:, :, :few] = k_shares.sum(2), v_shares.sum(2)
    return d_q, d_k, d_v, None


def _second_order(q: Parts, k: Parts, v: Parts, present: Parts, **settings: Any) -> Parts:
    """Return (o, o′, o″)."""
    (q0, q1, q2), (k0, k1, k2), (v0, v1, v2) = _alike(q), _alike(k), _alike(v)
    out = [_empty_like(q0) for _ in range(3)]
    launch, mask = _Launch.of(q0, present[0], settings, num_parts=3), _bytes(present[0], q0)
    launch(taylor_kernel, q0, q1, q2, k0, k1, k2, v0, v1, v2, mask, *out, strided=(q0, k0, v0, out[0]))
    return out[0], out[1], out[2]


def _alike(parts: Parts) -> list[Tensor]:
    """Return (f, f′, f″) with equal strides, zeros for None."""
    value = parts[0]
    assert value is not None
    full = [torch.zeros_like(value) if part is None else part for part in parts]
    if all(part.stride() == value.stride() and part.stride(-1) == 1 for part in full):
        return full
    return [part.contiguous() for part in full]


operation = Operation("band_attention", _forward, _backward, _second_order)
