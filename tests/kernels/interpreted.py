"""What tests need of Triton's interpreter."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")


@pytest.fixture(autouse=True)
def interpreter_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter prepare itself once for a launch: doing so again at every call of one function of a kernel by
    another takes a third of a test's time."""
    prepare = interpreter._patch_lang

    def prepare_once(function):
        languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
        is_done = bool(languages) and not any(tl.core.is_builtin(each.load) for each in languages)
        return None if is_done else prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
