"""Tell the pools of two people apart on a server that both send their runs to: a pool's own mark, and the ids made with
it."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from stability.runs.directory import write_atomically

FILE = "pool_mark"  # of a pool, which keeps it when it is copied or moved
MARK = re.compile(r"[0-9a-f]{8}")
WANDB_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")


def pool_mark(pool: Path) -> str:
    """Return the pool's mark, 8 random hex digits; one that has none, or a damaged one, gets it. Errors: ``OSError``
    from the disk."""
    file = pool / FILE
    if (found := _read(file)) is None:
        write_atomically(file, f"{secrets.token_hex(4)}\n".encode("ascii"))
        found = _read(file)  # another process may have been later
    assert found is not None, "it was just written"
    return found


def wandb_id(folder: Path, own: str, pool: Path) -> str:
    """Return the id on W&B of a run or a study: that of the W&B run in its folder, which goes on, else a new one.

    Args:
        folder: the folder of the run or the study.
        own: its id here, the first part of a new one.
        pool: its pool. The pool's mark is the second part, so that runs of one recipe in two pools are two on W&B.
    """
    return earlier_wandb_id(folder, own) or f"{own}-{pool_mark(pool)}"


def earlier_wandb_id(folder: Path, own: str) -> str | None:
    """Return the id of the W&B run that lies in a folder; None if there is none. It may be older than marks."""
    names = (WANDB_FOLDER.fullmatch(path.name) for path in sorted((folder / "wandb").glob("*run-*")))
    ids = [name[1] for name in names if name is not None]
    return next((each for each in reversed(ids) if each == own or each.startswith(f"{own}-")), None)


def _read(file: Path) -> str | None:
    try:
        found = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return found if MARK.fullmatch(found) else None
