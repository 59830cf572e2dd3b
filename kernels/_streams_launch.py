"""Choose paddings and block sizes for a connection with several streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.operation import Parts


@dataclass(frozen=True)
class Shape:
    """A connection's sizes, paddings and blocks.

    T tokens, N streams, C channels and R mixing logits (0: hyper-connections). Blocks fit 128 threads and their
    registers; they do not depend on the device, and neither do results.
    """

    tokens: int
    streams: int
    width: int
    options: int = 0
    lite: bool = False

    @property
    def outputs(self) -> int:
        """The number of logits per token, or per stream (hyper-connections)."""
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
        """The tokens per reading program; in hyper-connections each stream is a row."""
        return 32 if self.options else 32 // self.padded_streams

    @property
    def read_programs(self) -> int:
        return triton.cdiv(self.tokens, self.block_tokens)

    @property
    def block_width(self) -> int:
        return min(128 // self.padded_streams, max(16, triton.next_power_of_2(self.width)))

    @property
    def join_width(self) -> int:
        """The channels of one token per joining warp, whose threads hold all streams of some channels."""
        return min(1024 // self.padded_streams, triton.next_power_of_2(self.width))

    @property
    def column_programs(self) -> int:
        """The number of channel blocks over all streams."""
        return self.streams * triton.cdiv(self.width, self.block_width)

    @property
    def parts(self) -> int:
        """The number of token parts with separate weight gradients.

        Enough programs for a GPU, without partial gradients larger than X.
        """
        return max(1, min(triton.cdiv(self.tokens, 256), triton.cdiv(1024, self.column_programs)))

    @property
    def part_tokens(self) -> int:
        return triton.cdiv(self.tokens, self.parts)


MOST_STREAMS = 8
MOST_PERMUTATIONS = 128  # all of five streams; a program holds all weights and matrices
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TAYLOR_WARPS = 8  # a value and two derivatives need twice as many threads' registers
PRECISIONS = ("ieee", "tf32", "tf32x3")  # of float32 products with the weights


def choose_accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel unless its grid is empty.

    Args:
        kernel: the compiled kernel.
        grid: number of programs along each axis.
        arguments: tensors and sizes, in the kernel's order.
        constants: its compile-time constants.
    """
    if all(grid):
        kernel[grid](*arguments, **constants)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor on another one's device.

    Args:
        like: gives the device, and the dtype unless one is given.
        shape: sizes of the result.
        dtype: its number type, or None.
    """
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def dense(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def require(x_TSC: Tensor, accumulated: tuple[Tensor, ...], precision: str = "ieee") -> None:
    """Check the kernels' inputs.

    Args:
        x_TSC: streams.
        accumulated: tensors required in the dtype of sums.
        precision: one of `PRECISIONS`.

    Raises:
        ValueError: an unsupported dtype, number of streams or precision.
    """
    if x_TSC.dtype not in DTYPES:
        raise ValueError(f"streams of {x_TSC.dtype}: the kernels take float64, float32, bfloat16 and float16")
    if not 1 <= x_TSC.shape[1] <= MOST_STREAMS:
        raise ValueError(f"{x_TSC.shape[1]} streams: the kernels take 1 to {MOST_STREAMS}; use impl=reference")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(PRECISIONS)}")
    for tensor in accumulated:
        if tensor.dtype != choose_accumulator(x_TSC):
            raise ValueError(f"weights and coefficients of {tensor.dtype}: give {choose_accumulator(x_TSC)}")


def fill_missing(parts: Parts) -> list[Tensor]:
    """Return value and derivatives, contiguous and with one dtype, zeros for None."""
    if parts[0] is None:
        raise ValueError("a tensor that has derivatives along a line has a value")
    value = parts[0].contiguous()
    return [value, *(torch.zeros_like(value) if part is None else part.contiguous() for part in parts[1:])]


def allocate_three(tensor: Tensor, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty(tensor, *shape), empty(tensor, *shape), empty(tensor, *shape)
