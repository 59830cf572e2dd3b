"""Whether the head of a Ray cluster is still there, without asking Ray: whoever asks a dead one is not answered for
minutes, and its C++ parts cannot be interrupted meanwhile."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

POLL_S = 1.0
CONNECT_S = 5.0
# nobody listens: dead. A head of our own is not started anew; a cluster's may be.
OWN_S, CLUSTER_S = 2.0, 20.0
GRACE_S = 8.0  # for the driver to end by itself, with its own words
EXIT_CODE = 2
GONE = "the head of the Ray cluster ({address}) is gone; the same command goes on where this one stopped"


class Watch(threading.Thread):
    """Within the ``with`` block, from `begin` on, a look each second at whether anybody listens at the head's address.

    A head that is merely busy still listens: the kernel takes its connections. One that nobody listens for is lost:
    `require` says so, and a driver that does not get round to it, since it waits within Ray, is ended with the same
    words. Nothing is lost by that: what a sweep knows is in its run directories.
    """

    def __init__(self, *, is_own: bool):
        super().__init__(name="watch on the head of Ray", daemon=True)
        self.lost = ""
        self._patience_s = OWN_S if is_own else CLUSTER_S
        self._address = ""
        self._closed = threading.Event()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def begin(self, address: str) -> None:
        """``address``: HOST:PORT."""
        self._address = address
        self.start()

    def require(self) -> None:
        """Errors: ``RuntimeError`` where the head is lost."""
        if self.lost:
            raise RuntimeError(self.lost)

    def run(self) -> None:
        last_heard = time.monotonic()
        while not self._closed.wait(POLL_S):
            if listens(self._address):
                last_heard = time.monotonic()
            elif time.monotonic() - last_heard > self._patience_s:
                self.lost = GONE.format(address=self._address)
                break
        if self.lost and not self._closed.wait(GRACE_S):
            print(f"\x1b[?25h\nerror: {self.lost}" if sys.stderr.isatty() else f"error: {self.lost}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def listens(address: str) -> bool:
    """Whether somebody listens at HOST:PORT, or may: a machine that does not answer at all is not known to be dead."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
