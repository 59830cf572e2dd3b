"""Speed up imports of large packages, and the end of a process."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
DISABLED = "__dynamo_disable"  # torch stores the result of `disable` in this attribute of the function
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
    Parsing the standard library creates syntax trees; scanning them is a third of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def postpone_compiler() -> None:
    """Let torch import its compiler when something is compiled, not with the first optimizer.

    Importing it takes as long as importing torch. Outside of compiled code the functions used by optimizers do nothing.
    """
    sys.modules.setdefault(COMPILER, PostponedCompiler())


class PostponedCompiler(ModuleType):
    """A stand-in for torch's compiler until anything but `disable` and `graph_break` is used of it."""

    def __init__(self):
        super().__init__(COMPILER)
        self._disabled: list[Callable[..., Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: no graph is being made."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **settings: Any) -> Any:
        """Return a function as it is, until the compiler is imported.

        Args:
            fn: the function.
            recursive: as in ``torch._dynamo``.
            **settings: as in ``torch._dynamo``.
        """
        if fn is None or sys.modules.get(COMPILER) is not self:
            return self._imported().disable(fn, recursive, **settings)
        self._disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # attributes that are asked of every module
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def _imported(self) -> ModuleType:
        """Import the compiler in place of this module; functions returned as they were are then disabled anew."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
            for function in self._disabled:
                function.__dict__.pop(DISABLED, None)
        return importlib.import_module(COMPILER)


def end_at_once() -> None:
    """Prepare the interpreter's exit without a final garbage collection, a second with torch.

    This is the last action of a process (`atexit`, registered first).
    """
    gc.freeze()
    # Triton, loaded by torch's compiler, is bound by nanobind. That prints twenty lines about unfreed objects to
    # standard error, which are no user's mistake.
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
