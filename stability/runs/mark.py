"""A pool's own mark, to separate the runs of several pools on one server."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from stability.runs.directory import write_atomically

FILE = "pool_mark"  # a file of the pool, unchanged by a copy or a move
MARK = re.compile(r"[0-9a-f]{8}")
WANDB_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")


def pool_mark(pool: Path) -> str:
    """Return the pool's mark, 8 random hex digits; create it if missing or damaged.

    Raises:
        OSError: the disk refused.
    """
    file = pool / FILE
    if (found := _read(file)) is None:
        write_atomically(file, f"{secrets.token_hex(4)}\n".encode("ascii"))
        found = _read(file)  # another process may have overwritten it
    assert found is not None, "it was just written"
    return found


def wandb_id(folder: Path, own: str, pool: Path) -> str:
    """Return the W&B id of a run or study: an existing one from its folder, else a new one.

    Args:
        folder: the folder of the run or the study.
        own: its local id, the first part of a new one.
        pool: its pool. The pool's mark is the second part, so that equal runs in two pools have two W&B ids.
    """
    return earlier_wandb_id(folder, own) or f"{own}-{pool_mark(pool)}"


def earlier_wandb_id(folder: Path, own: str) -> str | None:
    """Return the id of the W&B run in a folder, or None; it may be older than marks."""
    names = (WANDB_FOLDER.fullmatch(path.name) for path in sorted((folder / "wandb").glob("*run-*")))
    ids = [name[1] for name in names if name is not None]
    return next((each for each in reversed(ids) if each == own or each.startswith(f"{own}-")), None)


def _read(file: Path) -> str | None:
    try:
        found = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return found if MARK.fullmatch(found) else None
