"""Warn in the name of the caller: the line of user code that leads here, however many of our functions lie between."""

from __future__ import annotations

import sys
import warnings

_OURS = (__name__.rpartition(".")[0], "contextlib")  # `AlphaMaxMonitor.step` is left through the latter


def warn(text: str) -> None:
    """Give a RuntimeWarning that names the first line outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _OURS)
