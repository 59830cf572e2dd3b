"""Load the slow reference functions of flash-linear-attention (MIT; github.com/fla-org/flash-linear-attention), which
need torch and einops only; the package itself imports triton, and is not imported here."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest


@cache
def fla_naive(op: str) -> ModuleType:
    """Return ``fla/ops/<op>/naive.py`` as a module; skips the test, by name, where fla-core is not installed.

    The functions compute in float32, whatever they are given: compare at 1e-4.
    """
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fla-core is not installed: pip install fla-core")
    path = Path(next(iter(found.submodule_search_locations))) / "ops" / op / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
