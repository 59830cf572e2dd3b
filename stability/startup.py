"""Import large packages without what makes that slow, and end without what they have to say then."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (20_000, 10, 5)  # objects made since the last look, and how many looks make a wider one: at most a million


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


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Run a ``with`` block in which the garbage collector looks for garbage about thirty times less often: drawing
    makes very many objects that stay until their figure is saved, and looking through them takes a tenth of its
    time."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def end_at_once() -> None:
    """Leave the interpreter without a last look through all of torch for garbage, which takes a second; the last thing
    that a process does (`atexit`, registered first).

    Triton, which torch loads with its compiler and that with the first optimizer, is bound by nanobind. That lists on
    standard error what was not freed, twenty lines that are nobody's mistake: where it is loaded, nothing is said there
    any more.
    """
    gc.freeze()
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
