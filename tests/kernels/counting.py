"""Count what kernels load, store and multiply while Triton interprets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

from kernels import availability
from kernels.roofline import Traffic


@dataclass
class Count:
    """Bytes under the masks of loads and of stores, and operations of `tl.dot`, a multiply-add being two."""

    read: int = 0
    written: int = 0
    flops: int = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.read, self.written, self.flops)


@contextmanager
def counting() -> Iterator[Count]:
    """Count while this is entered; compiled kernels are not counted."""
    if not availability.is_interpreted():
        pytest.skip("counted in Triton's interpreter")
    count = Count()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    multiply = InterpreterBuilder.create_dot

    def size(pointers, mask) -> int:
        return int(np.count_nonzero(mask.data)) * np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize

    def counted_load(self, ptrs, mask, *rest):
        count.read += size(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        count.written += size(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def counted_dot(self, a, b, *rest):
        count.flops += 2 * a.data.size * b.data.shape[-1]
        return multiply(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
        patch.setattr(InterpreterBuilder, "create_dot", counted_dot)
        yield count
