"""Speed up imports of large packages, and the end of a process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (20_000, 10, 5)  # thresholds of `gc.set_threshold`: a full collection per million new objects


@contextmanager
def uncollected() -> Iterator[None]:
    """Run a ``with`` block without the garbage collector.

    Collection is a quarter of the time of importing torch and finds no garbage. Objects created in the block are never
    scanned again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Run a ``with`` block with about thirty times fewer garbage collections.

    Drawing creates very many objects that live until their figure is saved; scanning them is a tenth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def end_at_once() -> None:
    """Prepare the interpreter's exit without a final garbage collection, a second with torch.

    This is the last action of a process (`atexit`, registered first).
    """
    gc.freeze()
    # Triton, loaded by torch's compiler and thus by the first optimizer, is bound by nanobind. That prints twenty
    # lines about unfreed objects to standard error, which are no user's mistake.
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
