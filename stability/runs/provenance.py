"""Provenance of a run: code, versions, machine, command. No torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from stability.printable import shell_text

PACKAGES = ("torch", "numpy", "ray", "wandb", "hydra-core", "pydantic")


def provenance(command: str = "") -> dict[str, Any]:
    """Return commit, dirty hash, versions, hardware and command; ``None`` if unknown.

    Args:
        command: the driver's command line, for a worker.
    """
    return {**_commit(), "versions": _versions(), "hardware": _hardware(), "command": command or command_line()}


def command_line() -> str:
    """Return the command line of this process, to be typed again."""
    program, *words = getattr(sys, "orig_argv", sys.argv)
    return shell_text(Path(program).name, *words)


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> dict[str, Any]:
    """Return HEAD of this file's checkout, and a short hash of its changes.

    New .py and .yaml files count as changes.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        # Without reports/*.pdf: every sweep writes one there, and no later run would count as unchanged.
        diff = subprocess.run(
            ["git", "diff", "HEAD", "--", ".", ":(exclude)reports/*.pdf"],
            cwd=root,
            capture_output=True,
            timeout=10,
            check=True,
        ).stdout
        new = subprocess.run(
            ["git", "ls-files", "-o", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
        diff += b"".join(
            name.encode() + (root / name).read_bytes() for name in new.splitlines() if name.endswith((".py", ".yaml"))
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": hashlib.sha256(diff).hexdigest()[:12] if diff else None}


def _hardware() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    torch = sys.modules.get("torch")  # a sweep's driver must not import torch just for a name
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory, 1) if memory else None,
        "gpu": torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
