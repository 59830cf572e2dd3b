"""Round to a narrower dtype as a GPU does, also in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Return ``x`` in ``DTYPE``; float32 to bfloat16 rounds to nearest, ties to even."""
    # the interpreter's own cast truncates: twice the error, always towards zero
    if INTERPRETED and x.dtype == tl.float32 and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)  # a NaN's bits could overflow
    return x.to(DTYPE)
