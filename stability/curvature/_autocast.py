"""Record which autocasts a loop switches on, without a hook on its model: a hook would have it compiled again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """An enabled autocast, as it was entered.

    ``depth``: the autocasts of this device that were entered while listening and are still open, itself included.
    ``gradients``: whether gradients were enabled.
    """

    device: str
    dtype: torch.dtype
    depth: int
    gradients: bool


@dataclass
class Listener:
    """The enabled autocasts that were entered since `listen`, each kind of them once, in their order."""

    entries: dict[Autocast, None] = field(default_factory=dict)
    _open: Counter[str] = field(default_factory=Counter)

    def enter(self, device: str, dtype: torch.dtype) -> None:
        self._open[device] += 1
        self.entries[Autocast(device, dtype, self._open[device], torch.is_grad_enabled())] = None

    def leave(self, device: str) -> None:
        self._open[device] -= self._open[device] > 0  # one that was open before


_LISTENERS: list[Listener] = []  # several monitors may have a step under way
_SUPPRESSED: list[bool] = []  # one entry for each `switched_off` that is open
_ENTER, _EXIT = torch.autocast.__enter__, torch.autocast.__exit__


def listen() -> Listener:
    """Start to list the enabled autocasts that are entered from now on, until `stop`."""
    _LISTENERS.append(Listener())
    torch.autocast.__enter__, torch.autocast.__exit__ = _enter, _exit  # type: ignore[method-assign]
    return _LISTENERS[-1]


def stop(listener: Listener) -> None:
    """End a list of `listen`; after the last one torch is as it was."""
    _LISTENERS[:] = [other for other in _LISTENERS if other is not listener]
    if not _LISTENERS:
        torch.autocast.__enter__, torch.autocast.__exit__ = _ENTER, _EXIT  # type: ignore[method-assign]


@contextmanager
def entered() -> Iterator[Listener]:
    """List the enabled autocasts that are entered in the block."""
    listener = listen()
    try:
        yield listener
    finally:
        stop(listener)


@contextmanager
def switched_off(devices: Iterable[str]) -> Iterator[None]:
    """Compute in the tensors' own types in the block: neither the autocast around it nor one inside is on."""
    _SUPPRESSED.append(True)
    with ExitStack() as around, entered():
        try:
            for device in devices:
                around.enter_context(torch.autocast(device, enabled=False))
            yield
        finally:
            _SUPPRESSED.pop()


def deepest(entries: Iterable[Autocast], device: str, gradients: bool) -> int:
    """Return how deep the autocasts of a device are nested in one gradient mode; 0 if there is none."""
    return max((each.depth for each in entries if each.device == device and each.gradients == gradients), default=0)


def of_loop(entries: Iterable[Autocast], device: str) -> Autocast | None:
    """Return the outermost autocast that a step entered with gradients, with the depth of the innermost; None if there
    is none. An evaluation under no_grad in the same block does not count."""
    entries = list(entries)
    outermost = min(
        (each for each in entries if each.device == device and each.gradients),
        key=lambda each: each.depth,
        default=None,
    )
    return None if outermost is None else Autocast(device, outermost.dtype, deepest(entries, device, True), True)


def _enter(context: Any) -> Any:
    """List an autocast and let torch enter it; switch it off first in a block of `switched_off`."""
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
