"""Write files whole: a reader never sees a half-written one."""

from __future__ import annotations

import os
from pathlib import Path


def replaced(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path``, in one step for whoever reads it, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
