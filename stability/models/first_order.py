"""Passes that are differentiated only once, as those of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stability.models.precision import autocast_dtype

_promised = False


@contextmanager
def differentiated_once(promised: bool = True) -> Iterator[None]:
    """Let mixers compute a forward pass by functions without second derivatives.

    A second derivative of such a pass raises an error. The backward pass may lie outside the context.

    Args:
        promised: False: change nothing, as for a compiled model.
    """
    global _promised
    before, _promised = _promised, promised
    try:
        yield
    finally:
        _promised = before


def is_differentiated_once(x: Tensor) -> bool:
    """Return whether a pass over ``x`` on a CPU is differentiated once, and without autocast."""
    return _promised and torch.is_grad_enabled() and x.device.type == "cpu" and autocast_dtype(x.device) is None
