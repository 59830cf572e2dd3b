"""Let Triton's interpreter prepare itself once for a launch, and not at every call of one function of a kernel by
another, which takes a third of a test's time."""

from __future__ import annotations

import inspect

import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def interpreter_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip putting the interpreter's functions in the place of the compiler's where they are there already."""
    prepare = interpreter._patch_lang

    def prepare_once(function):
        languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
        is_done = bool(languages) and not any(tl.core.is_builtin(each.load) for each in languages)
        return None if is_done else prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
