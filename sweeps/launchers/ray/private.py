"""Keep a Ray of this machine to its driver: it listens on the loopback address alone and demands a token that only the
environment of its own processes holds."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from sweeps.environment import environment

# Ray's switch for one machine alone, named after the systems where it is the default: nodes are then at 127.0.0.1,
# and the servers of a node at that address bind to nothing else
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def make_access() -> dict[str, str]:
    """Return the environment of a new private Ray's processes, with a random token of 256 bits.

    A token of the environment goes before one of a file, so that a cluster's own in ``~/.ray`` stays unused.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), ONE_MACHINE: "0"}


@contextmanager
def admitted(access: dict[str, str]) -> Iterator[None]:
    """Let this process join the private Ray of ``access`` within the ``with`` block.

    Ray reads all three variables once, when it is imported, so that its copies are renewed here, too.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    with environment(access):
        ray_constants.ENABLE_RAY_CLUSTER = False
        _read_environment()
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    _read_environment()


def _read_environment() -> None:
    """Have Ray read the mode and the token anew."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] compiled

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def require_loopback(address: str) -> None:
    """Raise a ``RuntimeError`` if other machines reach Ray at HOST:PORT, as with a version that lacks the switch."""
    host = address.rpartition(":")[0].strip("[]")
    if not ipaddress.ip_address(host).is_loopback:
        raise RuntimeError(f"this version of Ray listens at {address}, where other machines reach it")
