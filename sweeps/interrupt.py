"""Handle Ctrl-C during a sweep: the first saves, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager: the first SIGINT or SIGTERM sets `requested`, the next raises ``KeyboardInterrupt``.

    ``on_request`` runs inside the signal handler: it may set a value, but must not print or lock. Outside the main
    thread no handler is installed, because Python delivers no signals there.
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

    def run_steps(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps until an interrupt is requested, then close and so save them."""
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
