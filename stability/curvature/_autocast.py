"""Record which autocast a loop switches on, without a hook on its model: a hook would have it compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Autocast = tuple[str, torch.dtype]  # device type and dtype
_LISTENERS: list[list[Autocast]] = []  # several monitors may have a step under way
_ENTER = torch.autocast.__enter__


def listen() -> list[Autocast]:
    """Start a list of the enabled autocasts that are entered from now on, until `stop`."""
    _LISTENERS.append([])
    torch.autocast.__enter__ = _enter  # type: ignore[method-assign]
    return _LISTENERS[-1]


def stop(listener: list[Autocast]) -> None:
    """End a list of `listen`; after the last one torch is as it was."""
    _LISTENERS[:] = [other for other in _LISTENERS if other is not listener]
    if not _LISTENERS:
        torch.autocast.__enter__ = _ENTER  # type: ignore[method-assign]


@contextmanager
def entered() -> Iterator[list[Autocast]]:
    """List the enabled autocasts that are entered in the block."""
    listener = listen()
    try:
        yield listener
    finally:
        stop(listener)


def _enter(context: Any) -> Any:
    if context._enabled:
        for listener in _LISTENERS:
            listener.append((context.device, context.fast_dtype))
    return _ENTER(context)
