"""Compute recurrences with decay or delta rule by our Triton kernels, chunk by chunk.

Linear attention with decay (Yang et al. 2024, arXiv:2312.06635) and the delta rule in its WY form, with decay or
without (Yang et al. 2024, arXiv:2406.06484; Yang et al. 2025, arXiv:2412.06464).

Each program has one head of a sequence and a block of value features, and passes over the chunks with the state on
chip; within a chunk all is matrix products. Backward passes from the last chunk to the first; each chunk's first state
is recomputed and stored for it. Sums have a fixed order: same inputs, same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._recurrent_backward import walk_back
from kernels._recurrent_forward import walk, walk_along_line
from kernels.operation import Component, Operation, Parts

Precision = Literal["ieee", "tf32"]
CHUNK = 16  # positions at once: the smallest matrix product, with its system in registers
WIDEST_KEYS = 256  # per head: the state, keys by 16 values, then fills the registers
STATE_SIZE = 4096  # numbers of the state per program


def gated_linear_attention(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay: Tensor, *, precision: Precision | None = None
) -> Tensor:
    """Return y_t = S_tᵀ q_t with S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ.

    (B, H, N, V), float32 or wider, and so are state, decays and sums. B and H may be 1 except in v.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        log_decay: ln a ≤ 0, (B, H, N, K) per key feature, or (B, H, N, 1).
        precision: "tf32" rounds matrix products' factors to 10 bits, "ieee" does not; None: tf32 if torch permits, or
            within autocast.

    Raises:
        ValueError: more than 256 key features in a head.
    """
    return _scan(q_BHNK, k_BHNK, v_BHNV, None, log_decay, precision)


def delta_rule(
    q_BHNK: Tensor,
    k_BHNK: Tensor,
    v_BHNV: Tensor,
    beta_BHN: Tensor,
    log_decay: Tensor | None = None,
    *,
    precision: Precision | None = None,
) -> Tensor:
    """Return y_t = S_tᵀ q_t for the delta rule, (B, H, N, V).

    S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ, in float32 or wider.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        beta_BHN: β.
        log_decay: ln a as in `gated_linear_attention`; None: no decay.
        precision: as in `gated_linear_attention`.

    Raises:
        ValueError: more than 256 key features in a head.
    """
    return _scan(q_BHNK, k_BHNK, v_BHNV, beta_BHN[..., None], log_decay, precision)


def _scan(
    q: Tensor, k: Tensor, v_BHNV: Tensor, beta: Tensor | None, log_decay: Tensor | None, precision: Precision | None
) -> Tensor:
    if q.shape[-1] > WIDEST_KEYS:
        raise ValueError(f"impl=triton takes keys of up to {WIDEST_KEYS} features in a head, not {q.shape[-1]}")
    size = v_BHNV.shape[:3]
    parts = (q, k, v_BHNV, beta, log_decay)
    whole = (None if part is None else part.expand(*size, part.shape[3]) for part in parts)
    return SCAN(*whole, precision=precision or _torchs_precision(v_BHNV.device.type))


def _torchs_precision(device: str) -> Precision:
    """Return torch's permitted rounding for matrix products' factors on a device."""
    is_tf32 = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    # bfloat16 would also round the state and the delta rule's difference, by more than 1 % of the result; TF32
    # represents bfloat16 q, k and v exactly
    return "tf32" if is_tf32 or torch.is_autocast_enabled(device) else "ieee"


def blocks(keys: int, values: int) -> tuple[int, int]:
    """Return a program's padded numbers of key and value features.

    All keys, and as many values as fit with a small enough state.
    """
    key_block = max(16, triton.next_power_of_2(keys))
    return key_block, min(max(16, STATE_SIZE // key_block), max(16, triton.next_power_of_2(values)))


class Plan:
    """The sizes and launch arguments for one call of `SCAN`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Component, log_decay: Component):
        given = [each for each in (q, k, v, beta, log_decay) if each is not None]
        self.dtype = torch.float64 if any(each.dtype == torch.float64 for each in given) else torch.float32
        self.batch, self.heads, self.num, self.values = v.shape
        self.keys, self.device = q.shape[3], v.device
        self.decays = 0 if log_decay is None else log_decay.shape[3]
        key_block, value_block = blocks(self.keys, self.values)
        self.grid = (self.batch * self.heads, triton.cdiv(self.values, value_block))
        self.sizes = (self.heads, self.num, self.keys, self.values)
        self.blocks = {
            "DELTA": beta is not None,
            "LOG_DECAY": log_decay is not None,
            "DECAY_BLOCK": key_block if self.decays > 1 else 1,
            "KEY_BLOCK": key_block,
            "VALUE_BLOCK": value_block,
            "DTYPE": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }

    def choose_chunk_constants(self, precision: Precision) -> dict[str, Any]:
        """Return the constants for the chunk-wise kernels."""
        rounding = "ieee" if self.dtype == torch.float64 else precision
        return {**self.blocks, "CHUNK": CHUNK, "LEVELS": CHUNK.bit_length() - 1, "PRECISION": rounding}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def launch(self, kernel: Any, *arguments: Any, **settings: Any) -> None:
        """Launch a kernel with tensors, then `sizes`, then constants.

        Args:
            kernel: the compiled kernel.
            arguments: its tensors, in its order.
            settings: its compile-time constants.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            kernel[self.grid](*arguments, *self.sizes, **settings)


def _make_contiguous(tensor: Component) -> Component:
    """Return the tensor with contiguous features; any strides otherwise."""
    return tensor if tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensors: Sequence[Component]) -> tuple[tuple[int, ...], ...]:
    """Return each tensor's strides by batch, head and position; zeros for None."""
    return tuple((0, 0, 0) if each is None else each.stride()[:3] for each in tensors)


def _forward(*tensors: Any, precision: Precision) -> tuple[Tensor, tuple[Tensor, ...]]:
    plan, laid = Plan(*tensors), [_make_contiguous(each) for each in tensors]
    out = plan.empty(plan.batch, plan.heads, plan.num, plan.values)
    plan.launch(walk, *laid, _strides(laid), out, None, **plan.choose_chunk_constants(precision))
    return out, ()


def _backward(gradient: Tensor, needed: Any, saved: Any, *tensors: Any, precision: Precision) -> tuple[Component, ...]:
    """Return the gradients by all given tensors, even if not needed: one pass computes all."""
    plan, laid, dout = Plan(*tensors), [_make_contiguous(each) for each in tensors], _make_contiguous(gradient)
    states = plan.empty(plan.batch, plan.heads, triton.cdiv(plan.num, CHUNK), plan.keys, plan.values)
    settings = plan.choose_chunk_constants(precision)
    plan.launch(walk, *laid, _strides(laid), None, states, **settings)
    # each value block has its own partial gradients by q, k, β and ln a: no synchronisation between programs
    parts_of_each, sequence = (plan.grid[1], plan.grid[1], 1, plan.grid[1], plan.grid[1]), tensors[2].shape[:3]
    by_each = [
        None if of is None else plan.empty(parts, *sequence, of.shape[3])
        for of, parts in zip(tensors, parts_of_each, strict=True)
    ]
    plan.launch(
        walk_back, *laid, _strides(laid), states, dout, _strides([dout])[0], *by_each, **settings, num_warps=8
    )  # fmt: skip
    return tuple(
        None if by is None else by.sum(0).to(of.dtype) for by, of in zip(by_each, tensors, strict=True)
    )  # fmt: skip


def _second_order(*parts: Any, precision: Precision) -> Parts:
    """Return y, y′ and y″ position by position in float32 or wider.

    Without matrix products, so ``precision`` has no effect.
    """
    plan = Plan(*(value for value, _, _ in parts))
    filled = [(None,) * 3 if each[0] is None else tuple(map(_make_contiguous, _fill_missing(*each))) for each in parts]
    out = plan.empty(3, plan.batch, plan.heads, plan.num, plan.values)
    plan.launch(walk_along_line, *filled, tuple(map(_strides, filled)), out, **plan.blocks)
    return out[0], out[1], out[2]


def _fill_missing(value: Tensor, first: Component, second: Component) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts with zeros (expanded, without memory) for None."""
    zeros = value.new_zeros(value.shape[-1:]).expand(value.shape)
    return value, zeros if first is None else first, zeros if second is None else second


SCAN = Operation("scan", _forward, _backward, _second_order)
