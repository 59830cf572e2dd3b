"""Activations for feed-forward networks, by their names in settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F


def _squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": _squared_relu,
}
