"""Buffers with guards: what a kernel allocates is NaN beforehand and lies between bands of NaN, and so may what it
reads. Afterwards the bands are NaN still, and the buffer holds none: everything was written, and nothing beside it. A
read beyond an input gives NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

BAND = 64  # entries on each side


def between_bands(shape: tuple[int, ...], dtype: torch.dtype, device: Any = None) -> tuple[Tensor, Tensor]:
    """Return a contiguous tensor of NaN, and the flat buffer that it is the middle of."""
    buffer = torch.full((torch.Size(shape).numel() + 2 * BAND,), torch.nan, dtype=dtype, device=device)
    return buffer[BAND:-BAND].view(shape), buffer


def guarded(values: Tensor) -> Tensor:
    """Return a copy, as contiguous as the tensor was, between bands of NaN; what holds no NaN (bools) stays as it
    is."""
    if not values.is_floating_point():
        return values
    order = sorted(range(values.ndim), key=lambda dim: -values.stride(dim))
    laid = values.detach().permute(order)
    copy, _ = between_bands(tuple(laid.shape), values.dtype, values.device)
    copy.copy_(laid)
    back = [order.index(dim) for dim in range(values.ndim)]
    return copy.permute(back).requires_grad_(values.requires_grad)


class Allocations:
    """What was allocated while it watched."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        dtype = dtype or torch.float32
        if not dtype.is_floating_point:
            return torch.full(shape, 85, dtype=dtype, device=device)
        view, buffer = between_bands(shape, dtype, device)
        self.kept.append((view, buffer))
        return view

    def empty_like(self, like: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        order = sorted(range(like.ndim), key=lambda dim: -like.stride(dim))
        view = self.empty([like.shape[dim] for dim in order], dtype=dtype or like.dtype, device=like.device)
        return view.permute([order.index(dim) for dim in range(like.ndim)])

    def check(self) -> None:
        assert self.kept, "nothing was allocated by torch.empty or torch.empty_like"
        for view, buffer in self.kept:
            assert buffer[:BAND].isnan().all() and buffer[-BAND:].isnan().all(), (
                f"written beside a buffer of shape {tuple(view.shape)}"
            )
            assert not view.isnan().any(), f"not written, or NaN, in a buffer of shape {tuple(view.shape)}"


@contextmanager
def guards() -> Iterator[Allocations]:
    """Watch what `torch.empty` and `torch.empty_like` give while this is entered; check it at the end."""
    allocations = Allocations()
    with torch.device("cpu"):  # torch lists its constructors at the first call under a device: not ours, for good
        torch.ones(())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", allocations.empty)
        patch.setattr(torch, "empty_like", allocations.empty_like)
        yield allocations
    allocations.check()
