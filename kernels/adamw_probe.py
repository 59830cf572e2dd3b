"""Take AdamW's step and measure its norms and slope in one pass.

Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2. Sums: ‖g‖, ⟨g,u⟩ and ‖u‖ with u = (θ⁺ − θ)/η, with and without
weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._rounding import round_to
from kernels.availability import require_device

BLOCK = 4096  # entries of one program
NUM_WARPS = 8
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}
NUM_SUMS = 5


@dataclass(frozen=True)
class Probe:
    """A step's sums over all entries, (5,), float64 on the parameters' device.

    ⟨g,g⟩, ⟨g,δ⟩, ⟨δ,δ⟩, ⟨g,δ₀⟩ and ⟨δ₀,δ₀⟩. δ = θ⁺ − θ is the step after rounding to the parameters' dtype, δ₀ the one
    from the same state without weight decay. Probes of different parameters can be added. ``lr`` in methods is the rate
    η in u = δ/η; for several rates, their common base.
    """

    sums: Tensor

    def __add__(self, other: Probe) -> Probe:
        return Probe(self.sums + other.sums)

    def step_norm(self, *, decay: bool = True) -> float:
        """Return ‖δ‖, or ‖δ₀‖ without ``decay``."""
        return math.sqrt(self.sums[2 if decay else 4].item())

    def slope(self, lr: float, *, decay: bool = True) -> float:
        """Return ⟨g,u⟩."""
        return self.sums[1 if decay else 3].item() / lr


@triton.jit
def adamw_kernel(
    table, blocks, rates, scalars, sums,
    DTYPE: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor in place, and write its sums, (5,).

    Args:
        table: per tensor, addresses of θ, g, m and v, and its length.
        blocks: per program, its tensor and first entry.
        rates: per tensor, η/(1 − β₁ᵗ) and √(1 − β₂ᵗ), float64.
        scalars: 1 − β₁, β₂, 1 − β₂, ε, 1 − ηλ, float64: in float32, 1 − β loses digits for β near 1.
        sums: output, (programs, 5).
        DTYPE: of the tensors.
        ACC: of the arithmetic.
        ALIGNED: all addresses are multiples of 16.
        BLOCK: entries per program.
    """
    program = tl.program_id(0)
    tensor, first = tl.load(blocks + 2 * program), tl.load(blocks + 2 * program + 1)
    of_tensor = table + 5 * tensor
    theta_at = tl.load(of_tensor).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    g_at = tl.load(of_tensor + 1).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    m_at = tl.load(of_tensor + 2).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    v_at = tl.load(of_tensor + 3).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    if ALIGNED:  # for vectorised loads
        theta_at, g_at = tl.multiple_of(theta_at, 16), tl.multiple_of(g_at, 16)
        m_at, v_at = tl.multiple_of(m_at, 16), tl.multiple_of(v_at, 16)
        first = tl.multiple_of(first, BLOCK)
    entry = first + tl.arange(0, BLOCK)
    inside = entry < tl.load(of_tensor + 4)
    theta = tl.load(theta_at + entry, mask=inside, other=0.0).to(ACC)
    g = tl.load(g_at + entry, mask=inside, other=0.0).to(ACC)
    m = tl.load(m_at + entry, mask=inside, other=0.0).to(ACC)
    v = tl.load(v_at + entry, mask=inside, other=0.0).to(ACC)
    rate = tl.load(rates + 2 * tensor).to(ACC)
    root = tl.load(rates + 2 * tensor + 1).to(ACC)
    rest1, beta2 = tl.load(scalars).to(ACC), tl.load(scalars + 1).to(ACC)
    rest2, epsilon, kept = tl.load(scalars + 2).to(ACC), tl.load(scalars + 3).to(ACC), tl.load(scalars + 4).to(ACC)
    m = m + rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    step = rate * (m / (tl.sqrt(v) / root + epsilon))
    after = round_to(theta * kept - step, DTYPE)
    tl.store(theta_at + entry, after, mask=inside)
    tl.store(m_at + entry, round_to(m, DTYPE), mask=inside)
    tl.store(v_at + entry, round_to(v, DTYPE), mask=inside)
    moved = after.to(ACC) - theta
    alone = round_to(theta - step, DTYPE).to(ACC) - theta
    tl.store(sums + 5 * program, tl.sum(g * g))
    tl.store(sums + 5 * program + 1, tl.sum(g * moved))
    tl.store(sums + 5 * program + 2, tl.sum(moved * moved))
    tl.store(sums + 5 * program + 3, tl.sum(g * alone))
    tl.store(sums + 5 * program + 4, tl.sum(alone * alone))


@torch.no_grad()
def adamw_probe(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> Probe:
    """Take one AdamW step in place for all tensors in one launch; return its sums.

    As `torch.optim.AdamW`: m ← m + (1 − β₁)(g − m), v ← β₂v + (1 − β₂)g², θ ← (1 − ηλ)θ − η/(1 − β₁ᵗ) · m/(√v/√(1 −
    β₂ᵗ) + ε). Sums over a block are in the precision below, over blocks in float64, in a fixed order.

    Args:
        params: θ, all on one device with one dtype: float32 or bfloat16 (computed in float32), or float64; dense in
            memory.
        gradients: g.
        means: m, in the layout of θ.
        squares: v, in the layout of θ.
        steps: t ≥ 1 of each tensor including this step, scalar float32.
        lr: η.
        betas: β₁ and β₂.
        epsilon: ε.
        weight_decay: λ.

    Raises:
        ValueError: unsupported dtype, device or layout; one line.
    """
    require_device(params[0].device)
    gradients = [_match_layout(gradient, param) for gradient, param in zip(gradients, params, strict=True)]
    _check(params, means, squares)
    table, blocks, is_aligned = _table(params, gradients, means, squares)
    device, (beta1, beta2) = params[0].device, betas
    taken = torch.stack([step.to(device) for step in steps]).double()
    rates = torch.stack([lr / (1 - beta1**taken), (1 - beta2**taken).sqrt()], 1)
    wide = torch.float64 if params[0].dtype == torch.float64 else torch.float32
    sums = torch.empty(len(blocks), NUM_SUMS, dtype=wide, device=device)
    scalars = [1 - beta1, beta2, 1 - beta2, epsilon, 1 - lr * weight_decay]
    scalars = torch.tensor(scalars, dtype=torch.float64).to(device, non_blocking=True)
    constants: dict[str, Any] = {
        "DTYPE": DTYPES[params[0].dtype],
        "ACC": DTYPES[wide],
        "ALIGNED": is_aligned,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }
    with torch.cuda.device_of(params[0]):
        adamw_kernel[(len(blocks),)](table, blocks, rates, scalars, sums, **constants)
    return Probe(sums.double().sum(0))


def _match_layout(gradient: Tensor, param: Tensor) -> Tensor:
    """Return the gradient in the parameter's memory order and dtype."""
    if gradient.stride() == param.stride() and gradient.dtype == param.dtype:
        return gradient
    return torch.empty_like(param).copy_(gradient)


def _check(params: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor]) -> None:
    first = params[0]
    for param, mean, square in zip(params, means, squares, strict=True):
        if param.dtype not in DTYPES:
            raise ValueError(
                f"adamw_probe: {param.dtype} is not one of float32, bfloat16 and float64; use impl=reference"
            )
        for each in (param, mean, square):
            if each.dtype != first.dtype or each.device != first.device or each.stride() != param.stride():
                raise ValueError("adamw_probe: parameters and state differ in dtype, device or layout")
        if not _is_dense(param):
            raise ValueError(f"adamw_probe: a parameter of shape {tuple(param.shape)} has gaps or repeats in memory")


def _is_dense(x: Tensor) -> bool:
    """Return whether the entries fill a stretch of memory, each once."""
    filled = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step != filled:
            return False
        filled *= size
    return True


def _table(*columns: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Return `adamw_kernel`'s table and blocks, and whether all addresses are multiples of 16."""
    addresses = tuple(tuple(each.data_ptr() for each in row) for row in zip(*columns, strict=True))
    lengths = tuple(each.numel() for each in columns[0])
    is_aligned = all(address % 16 == 0 for row in addresses for address in row)
    device = columns[0][0].device
    return _copy_to_device(addresses, lengths, device), _blocks(lengths, device), is_aligned


@lru_cache(maxsize=16)
def _copy_to_device(addresses: tuple[tuple[int, ...], ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    rows = [[*row, length] for row, length in zip(addresses, lengths, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _blocks(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    rows = [(tensor, first) for tensor, length in enumerate(lengths) for first in range(0, length, BLOCK)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).to(device, non_blocking=True)
