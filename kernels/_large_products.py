"""Leave a kernel pass's large matrix product to torch, with factors rounded and sums as in the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, (B, I, L): bfloat16 products with sums in float32, others in their own dtype.

    float32 products have torch's own precision on the device, from which the kernels' is chosen.

    Args:
        left: (B, I, J).
        right: (B, J, L).
    """
    device = left.device.type
    with torch.autocast(device, enabled=False):
        if left.dtype != torch.bfloat16:
            return left @ right
        return torch.bmm(left, right, out_dtype=torch.float32) if device == "cuda" else left.float() @ right.float()
