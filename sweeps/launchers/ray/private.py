"""Restrict a Ray of this machine to its driver.

It listens on the loopback address only. It requires a token from the environment of its own processes.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from sweeps.launchers import set_environment

# With "0", Ray runs on this machine only, its default on Windows and macOS: nodes have the address 127.0.0.1, and their
# servers bind to no other address.
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def make_access() -> dict[str, str]:
    """Return the environment of a new private Ray, with a random 256-bit token.

    Ray prefers it to a token file, so a cluster's own in ``~/.ray`` stays unused.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), ONE_MACHINE: "0"}


@contextmanager
def join_private(access: dict[str, str]) -> Iterator[None]:
    """Let this process join the private Ray of ``access`` within the ``with`` block.

    Ray reads all three variables at import only, so its copies are renewed here.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    with set_environment(access):
        ray_constants.ENABLE_RAY_CLUSTER = False
        _read_environment()
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    _read_environment()


def _read_environment() -> None:
    """Make Ray read the authentication mode and token again."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] compiled

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def require_loopback(address: str) -> None:
    """Raise a ``RuntimeError`` if other machines can reach Ray at HOST:PORT.

    This happens with a version of Ray without the switch `ONE_MACHINE`.
    """
    host = address.rpartition(":")[0].strip("[]")
    if not ipaddress.ip_address(host).is_loopback:
        raise RuntimeError(f"this version of Ray listens at {address}, where other machines reach it")
