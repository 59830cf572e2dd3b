"""Setting ``impl`` for mechanisms with our Triton kernels (`stability.config.impl`).

Some also have flash-linear-attention's (`_fla`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stability.config.identity import Since
from stability.config.impl import Impl, Use

IMPL_OR_FLA = (
    "how it is computed: reference, torch's own products, twice differentiable; fla, the kernels of "
    "flash-linear-attention, on CUDA, for training alone, with queries, keys and values in bfloat16; triton, kernels "
    "of ours, on CUDA; auto, triton where it can be, settled when a sweep is read"
)
ImplOrFla = Annotated[Literal["reference", "fla", "triton", "auto"], Since("reference"), Field(description=IMPL_OR_FLA)]

__all__ = ["Impl", "ImplOrFla", "Use"]
