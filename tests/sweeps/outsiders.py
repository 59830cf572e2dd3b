"""What another process of this machine finds of a sweep's Ray: the sockets that listen, and whether it is let in."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# Ray else takes 127.0.0.1 for the machine's other address, where nobody listens, and does not even get to be refused
CLEAN = {
    "PATH": os.environ["PATH"],
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
}
ASK = """
import sys
from ray._raylet import GcsClient
try:
    print("let in", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))
except Exception as error:
    print("refused", error)
"""
JOIN = """
import logging, sys, ray
try:
    ray.init(address=sys.argv[1], logging_level=logging.CRITICAL)
    print("let in", ray.get(ray.remote(lambda: 1).remote()))
except Exception as error:
    print("refused", error)
"""


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket of a process that takes connections; one of IPv4 as IPv4."""
    process, inodes, found = Path("/proc") / str(pid), set(), set()
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))  # noqa: PTH115 "socket:[1]" is no path
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = (int(address[start : start + 8], 16) for start in range(0, len(address), 8))
                host = socket.inet_ntop(family, b"".join(struct.pack("=I", word) for word in words))
                found.add((host, int(port, 16)))
    return found


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def told(script: str, address: str, **more: str) -> str:
    """What a process with a clean environment, but for ``more``, says of its try to get in."""
    tried = subprocess.run(
        [sys.executable, "-c", script, address], env=CLEAN | more, capture_output=True, text=True, timeout=90
    )
    return tried.stdout.strip() or f"exit code {tried.returncode}: {tried.stderr[-300:]}"
