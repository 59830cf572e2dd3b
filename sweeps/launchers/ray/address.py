"""Check whether a Ray cluster answers at an address, before Ray itself connects.

``python address.py ADDRESS`` is the check, in its own process. Ray itself would retry for minutes, and its C++ parts
would write to the terminal. The process has its own output and time limit.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CONNECT_S = 5
LOOK_S = 60.0  # importing Ray is slow on a busy machine
OWN = "stability-ray-"  # prefix of the folder of a Ray that a sweep started for itself
ANOTHERS = "what runs on this machine is another sweep's own Ray, which ends with it"
NO_ACCESS = 3  # exit code of the check for a missing token
TOKEN = "its Ray demands a token; export RAY_AUTH_MODE=token, with that token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
HOW_TO_START = "start one with: ray start --head"
NOT_A_HEAD = "what answers there is not the head of a Ray cluster that this version of Ray can join"


def check(address: str) -> None:
    """Raise a ``RuntimeError`` if this environment cannot join a cluster at ``address``.

    ``address`` is "auto" or HOST:PORT of a head. Reasons: no cluster answers, it requires a token that this environment
    lacks, or auto finds another sweep's own Ray, whose end would kill this sweep.
    """
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": str(CONNECT_S)}
    command = [sys.executable, __file__, address]
    try:
        look = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S
        )
        code, printed = look.returncode, look.stdout.strip()
    except subprocess.TimeoutExpired:
        code, printed = 1, ""
    if code == NO_ACCESS:
        raise RuntimeError(f"ray.address={address}: {TOKEN}")
    if code:
        raise RuntimeError(
            f"ray.address={address}: no Ray cluster that can be joined: {printed or NOT_A_HEAD}; {HOW_TO_START}"
        )


def _request_nodes(address: str) -> None:
    """Ask the head at ``address`` for its list of nodes.

    Ray's own check may exit the process or block.

    Raises:
        ConnectionError: no head answers; the message is the reason.
        PermissionError: the head requires a token.
    """
    from ray._private import services
    from ray._private.authentication import authentication_token_setup as tokens
    from ray._raylet import GcsClient  # type: ignore[attr-defined] compiled
    from ray.exceptions import AuthenticationError

    try:
        found = services.canonicalize_bootstrap_address_or_die(address)
    except ConnectionError:
        raise ConnectionError("none runs on this machine") from None
    except ValueError as error:  # an invalid RAY_ADDRESS
        raise ConnectionError(str(error)) from None
    if address == "auto":
        if _is_of_a_sweep(found):
            raise ConnectionError(ANOTHERS)
        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as ray.init does
    connect(found)
    try:
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=found).get_all_node_info(timeout=CONNECT_S)
    except AuthenticationError:
        raise PermissionError from None


def _is_of_a_sweep(address: str) -> bool:
    """Return whether a sweep started the Ray at HOST:PORT for itself.

    Its raylet's command line then contains the folder's prefix.
    """
    head = re.compile(rf"--gcs-address=[^ ]*:{address.rpartition(':')[2]} ")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if OWN in words and head.search(words):
                return True
    return False


def connect(address: str) -> None:
    """Raise a ``ConnectionError`` if HOST:PORT does not accept connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except socket.gaierror:
        raise ConnectionError(f"there is no host {host}") from None
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address} ({error.strerror or error})") from None


if __name__ == "__main__":
    del sys.path[0]  # this file's folder; its modules must not shadow top-level ones
    try:
        _request_nodes(sys.argv[1])
    except ConnectionError as error:
        print(error)
        sys.exit(1)
    except PermissionError:
        sys.exit(NO_ACCESS)
