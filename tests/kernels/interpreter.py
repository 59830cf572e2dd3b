"""Make Triton's interpreter bearable: it prepares the language anew at each call of a device function, which takes
longer than what the function does."""

from __future__ import annotations

import inspect

import pytest
import triton.language as tl
from triton.runtime import interpreter


def prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Let a launch prepare each module of the language once, and its device functions find them prepared."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def at_first(fn):
        modules = {id(value) for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
        if modules <= prepared:
            return None
        prepared.update(modules)
        return prepare(fn)

    def launched(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", at_first)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)
