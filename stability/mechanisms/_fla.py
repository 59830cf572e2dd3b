"""Define the setting ``impl`` of mechanisms of which flash-linear-attention has kernels (`kernels.recurrences`)."""

from __future__ import annotations

from typing import Literal

from kernels.recurrences import lacking

Impl = Literal["reference", "fla"]
IMPL = (
    "how it is computed: reference, torch's own products, twice differentiable; fla, the Triton kernels of "
    "flash-linear-attention, on CUDA, for training alone, with queries, keys and values in bfloat16"
)


def require_kernels(mechanism: str, impl: Impl) -> None:
    """Raise a ``ValueError`` of one line where ``impl`` asks for kernels that cannot run here. ``mechanism``: whose
    setting it is."""
    if impl == "fla" and (what := lacking()) is not None:
        raise ValueError(f"mechanism.{mechanism}.impl=fla needs {what}; impl=reference computes the same everywhere")
