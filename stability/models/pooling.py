"""One vector of all positions: the input of a head, or a sentence's embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def first_position(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the first position, a class token, (B, 1, D)."""
    return hidden_BND[:, :1]


def mean_over_positions(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the mean over the valid positions (without a mask: all), (B, 1, D)."""
    if mask_BN is None:
        return hidden_BND.mean(1, keepdim=True)
    weights_BN1 = (mask_BN / mask_BN.sum(1, keepdim=True))[..., None].to(hidden_BND.dtype)
    return (hidden_BND.where(mask_BN[..., None], 0.0) * weights_BN1).sum(1, keepdim=True)


def max_over_positions(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return each dimension's maximum over the valid positions (without a mask: all), (B, 1, D)."""
    if mask_BN is not None:
        lowest = torch.finfo(hidden_BND.dtype).min
        hidden_BND = hidden_BND.masked_fill(~mask_BN[..., None], lowest)
    return hidden_BND.amax(1, keepdim=True)
