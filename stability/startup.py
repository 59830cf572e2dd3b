"""Import large packages without what makes that slow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Run a ``with`` block without the garbage collector, which takes a quarter of the time of importing torch and
    finds nothing. What is made within the ``with`` block is never looked through again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
