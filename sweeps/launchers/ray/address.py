"""Find out whether a Ray cluster answers at an address, before anything is joined: Ray itself looks for minutes, and
its C++ parts write to the terminal meanwhile.

``python address.py ADDRESS`` is the look, in a process of its own: what it prints is kept from the terminal, and its
patience is not the sweep's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

CONNECT_S = 5
LOOK_S = 60.0  # importing Ray takes a machine that is busy a while
OWN = "stability-ray-"  # so begins the name of the folder of a Ray that a sweep started for itself
ANOTHERS = "what runs on this machine is another sweep's own Ray, which ends with it"
NOT_A_HEAD = "what answers there is not the head of a Ray cluster that this version of Ray can join"


def check(address: str) -> None:
    """Raise a ``RuntimeError`` where no cluster answers at ``address`` (auto, or HOST:PORT of a head), or where auto
    finds another sweep's own Ray, whose end would kill this one."""
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": str(CONNECT_S)}
    command = [sys.executable, __file__, address]
    try:
        look = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S
        )
        code, printed = look.returncode, look.stdout
    except subprocess.TimeoutExpired:
        code, printed = 1, ""
    is_anothers = address == "auto" and not code and Path(printed.strip()).name.startswith(OWN)
    if code or is_anothers:
        reason = ANOTHERS if is_anothers else printed.strip() or NOT_A_HEAD
        raise RuntimeError(
            f"ray.address={address}: no Ray cluster that can be joined: {reason}; start one with: ray start --head"
        )


def _look(address: str) -> None:
    """Print the folder of the cluster at ``address``. Errors: ``ConnectionError`` with the reason where none answers.
    Ray's own check ends the process as it likes, or stays."""
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined] compiled

    try:
        found = services.canonicalize_bootstrap_address_or_die(address)
    except ConnectionError:
        raise ConnectionError("none runs on this machine") from None
    except ValueError as error:  # what RAY_ADDRESS says
        raise ConnectionError(str(error)) from None
    connect(found)
    nodes = GcsClient(address=found).get_all_node_info(timeout=CONNECT_S)
    print(next(node.temp_dir for node in nodes.values() if node.is_head_node))


def connect(address: str) -> None:
    """Raise a ``ConnectionError`` where nobody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except socket.gaierror:
        raise ConnectionError(f"there is no host {host}") from None
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address} ({error.strerror or error})") from None


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules are no top-level ones
    try:
        _look(sys.argv[1])
    except ConnectionError as error:
        print(error)
        sys.exit(1)
