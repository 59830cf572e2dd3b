"""The watch on what a driver of Ray cannot do without: dead is where nobody listens, busy is not dead."""

import socket
import subprocess
import sys
import time

import pytest

from sweeps.launchers.ray.watch import EXIT_CODE, Watch


def listening():
    """A listener that never answers, as a head that is busy does."""
    return socket.create_server(("127.0.0.1", 0))


def test_who_is_busy_is_not_lost_and_who_is_gone_is_told_within_seconds():
    head = listening()
    address = "{}:{}".format(*head.getsockname())
    with Watch() as watch:
        watch.begin({"the head": (address, 0.5)})
        time.sleep(1.5)
        watch.require()
        head.close()
        deadline = time.monotonic() + 10
        while not watch.lost and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(RuntimeError, match=f"^the head \\({address}\\) is gone; the same command goes on"):
            watch.require()


STUCK = """
import socket, time
from sweeps.launchers.ray import watch
watch.GRACE_S = 0.5
head = socket.create_server(("127.0.0.1", 0))
with watch.Watch() as one:
    one.begin({"the head": ("{}:{}".format(*head.getsockname()), 0.5)})
    head.close()
    time.sleep(60)
"""


def test_a_driver_that_does_not_get_round_to_it_is_ended_with_a_word():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30)
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.startswith("error: the head (127.0.0.1:") and len(ended.stderr.splitlines()) == 1
