"""Record the autocasts of a training loop.

The model gets no hook, because a hook would make torch compile it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """An enabled autocast at its entry.

    Attributes:
        device: device type.
        dtype: type of the casts.
        depth: number of this device's autocasts entered while listening and still open, including this one.
        gradients: whether gradients were enabled.
    """

    device: str
    dtype: torch.dtype
    depth: int
    gradients: bool


@dataclass
class Listener:
    """Enabled autocasts entered since `listen`: each kind once, in order of entry."""

    entries: dict[Autocast, None] = field(default_factory=dict)
    _open: Counter[str] = field(default_factory=Counter)

    def enter(self, device: str, dtype: torch.dtype) -> None:
        self._open[device] += 1
        self.entries[Autocast(device, dtype, self._open[device], torch.is_grad_enabled())] = None

    def leave(self, device: str) -> None:
        self._open[device] -= self._open[device] > 0  # an autocast from before `listen` was not counted


_LISTENERS: list[Listener] = []  # several monitors may have a step under way
_SUPPRESSED: list[bool] = []  # one entry for each `switch_off` that is open
_ENTER, _EXIT = torch.autocast.__enter__, torch.autocast.__exit__


def listen() -> Listener:
    """Start a list of the enabled autocasts entered from now on, until `stop`."""
    _LISTENERS.append(Listener())
    torch.autocast.__enter__, torch.autocast.__exit__ = _enter, _exit  # type: ignore[method-assign]
    return _LISTENERS[-1]


def stop(listener: Listener) -> None:
    """End a listener; the last one's end restores torch's own methods."""
    _LISTENERS[:] = [other for other in _LISTENERS if other is not listener]
    if not _LISTENERS:
        torch.autocast.__enter__, torch.autocast.__exit__ = _ENTER, _EXIT  # type: ignore[method-assign]


@contextmanager
def record_autocasts() -> Iterator[Listener]:
    """List the enabled autocasts entered in the block."""
    listener = listen()
    try:
        yield listener
    finally:
        stop(listener)


@contextmanager
def switch_off(devices: Iterable[str]) -> Iterator[None]:
    """Turn autocast off in the block, both around and inside it.

    Operations run in their tensors' own types.
    """
    _SUPPRESSED.append(True)
    with ExitStack() as around, record_autocasts():
        try:
            for device in devices:
                around.enter_context(torch.autocast(device, enabled=False))
            yield
        finally:
            _SUPPRESSED.pop()


def find_depth(entries: Iterable[Autocast], device: str, gradients: bool) -> int:
    """Return the nesting depth of a device's autocasts in one gradient mode.

    Args:
        entries: recorded autocasts.
        device: device type.
        gradients: gradient mode of the autocasts counted.

    Returns:
        The largest depth; 0 without such an autocast.
    """
    return max((each.depth for each in entries if each.device == device and each.gradients == gradients), default=0)


def find_loop_autocast(entries: Iterable[Autocast], device: str) -> Autocast | None:
    """Return the outermost autocast entered with gradients, at the innermost one's depth.

    None without such an autocast. An evaluation under no_grad in the same block does not count.
    """
    entries = list(entries)
    outermost = min(
        (each for each in entries if each.device == device and each.gradients),
        key=lambda each: each.depth,
        default=None,
    )
    return None if outermost is None else Autocast(device, outermost.dtype, find_depth(entries, device, True), True)


def _enter(context: Any) -> Any:
    """Record and enter an autocast; inside `switch_off`, enter it disabled and unrecorded."""
    if not context._enabled:
        return _ENTER(context)
    if _SUPPRESSED:
        context._enabled = False
        try:
            return _ENTER(context)
        finally:
            context._enabled = True
    for listener in _LISTENERS:
        listener.enter(context.device, context.fast_dtype)
    return _ENTER(context)


def _exit(context: Any, *error: Any) -> Any:
    if context._enabled and not _SUPPRESSED:
        for listener in _LISTENERS:
            listener.leave(context.device)
    return _EXIT(context, *error)
