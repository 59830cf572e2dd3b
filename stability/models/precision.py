"""Say in which precision a model computes: float32, or bfloat16 where torch's autocast takes it, weights in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stability.config.training import Precision


def computing_in(precision: Precision, device: torch.device | str) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass computes in a precision.

    "bf16": matrix products take bfloat16 (`torch.autocast`), everything that joins the residual state, norms and losses
    stay in float32, and so do parameters, gradients and the optimizer's state. The backward pass stands outside of it:
    each operation goes back in the dtype that it went forth in. "float32" and "tf32" differ by what
    `allow_tf32` sets for the process, not here.
    """
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")


def in_float32(device: torch.device | str) -> AbstractContextManager[Any]:
    """Return the context in which operations keep the dtype of what they are given, whatever computes around them. On
    torch's meta device, which has no autocast, they always do."""
    kind = torch.device(device).type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def rounds_products(device: torch.device | str) -> bool:
    """Return whether matrix products round their factors to fewer bits than float32 has: within autocast, or where TF32
    is allowed."""
    kind = torch.device(device).type
    is_tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return is_tf32 or (kind != "meta" and torch.is_autocast_enabled(kind))


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raise a ``ValueError`` where the device does not compute in that precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            "precision=tf32 is a mode of CUDA devices, and this one is a CPU; use precision=float32 or bf16"
        )


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Set for this process whether float32 matrix products and convolutions on CUDA may round their factors to TF32 (10
    bits of mantissa). Errors: ``ValueError`` where tf32 is asked for and the device has none."""
    require_precision(precision, device)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider: what runs through the blocks is never narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
