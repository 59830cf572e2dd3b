"""Watch whether what a driver of Ray cannot do without is still there, without asking Ray: whoever asks a dead head is
not answered for minutes, and Ray's C++ parts cannot be interrupted meanwhile, or end the process without a word."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping

POLL_S = 0.5
CONNECT_S = 5.0
GONE_S = 1.0  # nobody listens: dead, and not started anew …
CLUSTER_S = 15.0  # … but for a cluster's head, which may be
GRACE_S = 8.0  # for the driver to end by itself, with its own words
EXIT_CODE = 2
GONE = "{what} ({address}) is gone; the same command goes on where this one stopped"


class Watch(threading.Thread):
    """A thread that within the ``with`` block, from `begin` on, looks whether anybody listens at some addresses.

    A process that is merely busy still listens: the kernel takes its connections. One that nobody listens for is lost:
    `require` says so, and a driver that does not get round to it, since it waits within Ray, is ended with the same
    words. Nothing is lost by that: what a sweep knows is in its run directories.
    """

    def __init__(self) -> None:
        super().__init__(name="watch on Ray", daemon=True)
        self.lost = ""
        self._watched: dict[str, tuple[str, float]] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def begin(self, watched: Mapping[str, tuple[str, float]]) -> None:
        """Begin to look. ``watched``: by what it is HOST:PORT, and the seconds after which it is lost where nobody
        listens."""
        self._watched = dict(watched)
        self.start()

    def require(self) -> None:
        """Raise a ``RuntimeError`` where something is lost."""
        if self.lost:
            raise RuntimeError(self.lost)

    def run(self) -> None:
        """Look every `POLL_S` until something is lost or the ``with`` block is left; end the process where it is still
        within the block `GRACE_S` after a loss."""
        heard = dict.fromkeys(self._watched, time.monotonic())
        while not self.lost and not self._closed.wait(POLL_S):
            for what, (address, patience_s) in self._watched.items():
                if listens(address):
                    heard[what] = time.monotonic()
                elif time.monotonic() - heard[what] > patience_s:
                    self.lost = GONE.format(what=what, address=address)
        if self.lost and not self._closed.wait(GRACE_S):
            print(f"\x1b[?25h\nerror: {self.lost}" if sys.stderr.isatty() else f"error: {self.lost}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def listens(address: str) -> bool:
    """Return whether somebody listens at HOST:PORT, or may: a machine that does not answer at all is not known to be
    dead."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
