"""Precision of a model's computation: float32, or bfloat16 by autocast with float32 weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stability.config.training import Precision


def computing_in(precision: Precision, device: torch.device | str) -> AbstractContextManager[Any]:
    """Return the context for a forward pass in a precision.

    "bf16": matrix products are in bfloat16 (`torch.autocast`). Additions to the residual state, norms and losses remain
    in float32, and so do parameters, gradients and the optimizer's state. The backward pass is outside the context:
    each operation uses its forward dtype. "float32" and "tf32" differ only by `allow_tf32`, for the whole process.
    """
    return torch.autocast(_switch(device), dtype=torch.bfloat16, enabled=precision == "bf16")


def in_float32(device: torch.device | str) -> AbstractContextManager[Any]:
    """Return a context without autocast: operations use their inputs' dtype."""
    return torch.autocast(_switch(device), enabled=False)


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """Return autocast's dtype on a device, or None without autocast."""
    kind = _switch(device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _switch(device: torch.device | str) -> str:
    """Return the type of device with the autocast switch of ``device``."""
    kind = torch.device(device).type
    # torch's meta device has no autocast. A plan (sweeps.traced) emulates CUDA's and uses the CPU's switch, because
    # torch.utils.checkpoint restores it for the recomputation.
    return "cpu" if kind == "meta" else kind


def rounds_products(device: torch.device | str) -> bool:
    """Return whether matrix products round their factors below float32.

    This is so within autocast, or if TF32 is allowed.
    """
    kind = torch.device(device).type
    is_tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return is_tf32 or autocast_dtype(device) is not None


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raise a ``ValueError`` if the device does not support the precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            "precision=tf32 is a mode of CUDA devices, and this one is a CPU; use precision=float32 or bf16"
        )


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Set whether float32 products and convolutions on CUDA may use TF32.

    TF32 rounds factors to 10 bits of mantissa. The setting is for the whole process.

    Raises:
        ValueError: precision is tf32 and the device has none.
    """
    require_precision(precision, device)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider, the least dtype of the residual state."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
