"""Warn at the caller's line: the first one outside this package."""

from __future__ import annotations

import sys
import warnings

_OURS = (__name__.rpartition(".")[0], "contextlib")  # `AlphaMaxMonitor.step` exits through contextlib


def warn(text: str) -> None:
    """Give a RuntimeWarning at the first line outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _OURS)
