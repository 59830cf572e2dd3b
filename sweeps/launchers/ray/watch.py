"""Detect the loss of Ray's head or node without calling Ray.

A call to a dead head blocks for minutes in C++ code. Such a call cannot be interrupted, and may end the process
silently.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping

POLL_S = 0.5
CONNECT_S = 5.0
GONE_S = 1.0  # a refused connection means a dead process, which is never restarted …
CLUSTER_S = 15.0  # … except a cluster's head
GRACE_S = 8.0  # time for the driver to end by itself with its own message
EXIT_CODE = 2
GONE = "{what} ({address}) is gone; the same command goes on where this one stopped"


class Watch(threading.Thread):
    """A thread that tests whether addresses accept connections, within the ``with`` block.

    A busy process still accepts connections in the kernel. After a refusal for long enough, `require` raises. If the
    driver hangs within Ray and cannot raise, its process is ended with the same message. Nothing is lost: a sweep's
    state is in its run folders.
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
        """Start the thread. ``watched``: {name: (HOST:PORT, seconds of refusal until it counts as lost)}."""
        self._watched = dict(watched)
        self.start()

    def require(self) -> None:
        """Raise a ``RuntimeError`` if an address was lost."""
        if self.lost:
            raise RuntimeError(self.lost)

    def run(self) -> None:
        """Check every `POLL_S` until a loss or the end of the ``with`` block.

        `GRACE_S` after a loss, the process is ended if it is still within the block.
        """
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
    """Return whether HOST:PORT accepts connections, or a timeout leaves it open.

    A machine without any answer is not necessarily dead.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
