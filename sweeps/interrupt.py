"""Give Ctrl-C its meaning during a sweep: the first one lets steps finish and saves, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A ``with`` block within which the first SIGINT or SIGTERM sets `requested`; another one raises
    ``KeyboardInterrupt``.

    ``on_request`` runs inside the signal handler: it may set a value, it must not print or lock. Outside the main
    thread, where Python delivers no signals, nothing is installed.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None):
        self.requested = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], None] | int | None] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def until(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps, as far as no interrupt is requested; after the one during which it was they are closed,
        which saves what they work on."""
        with closing(steps):  # type: ignore[type-var]
            for _ in steps:
                yield
                if self.requested:
                    return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
