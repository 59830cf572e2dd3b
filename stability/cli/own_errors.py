"""Describe an error in a user's own code: its class, message and line, and a file with the traceback."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import Literal

from stability.registry import FAMILIES, list_plugin_files
from stability.runs.directory import INSTALLED

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("stability", "sweeps", "analysis", "kernels")  # of this project
READERS = "data"  # parts that pass on errors of files, which are no bugs


def find_own_line(error: BaseException) -> str:
    """Return the user's line behind an error; "" if the user's code is not involved, or refuses by ``raise``.

    Format: ``FILE:LINE, in FUNCTION: CODE``. The user's code: parts (plugins, and files in the families' folders), and
    modules outside of this project and of installed packages. It is involved if no other code of this project lies
    between its line and the error.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    owners = [_find_owner(frame.f_code.co_filename) for frame, _ in frames]
    places = [place for place, owner in enumerate(owners) if owner != "others"]
    if not places or owners[places[-1]] != "user":
        return ""
    frame, number = frames[places[-1]]
    line = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name).line or ""
    is_last, is_refusal = places[-1] == len(frames) - 1, isinstance(error, ValueError | RuntimeError) and str(error)
    if is_last and is_refusal and line.startswith("raise"):
        return ""  # a message of its own
    return f"{frame.f_code.co_filename}:{number}, in {frame.f_code.co_name}: {line}"


def describe_own_error(error: BaseException, place: str) -> str:
    """Return three lines: class and message, the ``place``, and the file that the traceback is written to."""
    with tempfile.NamedTemporaryFile("w", prefix="traceback-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    name = type(error).__name__
    return f"{f'{name}: {error}' if str(error) else name}\n  at {place}\n  traceback: {file.name}"


def _find_owner(file: str) -> Literal["user", "project", "others"]:
    """Return whose code a file has: the user's, this project's, or an installed package's."""
    path = Path(file).resolve()
    if path in list_plugin_files():
        return "user"
    if any(path.is_relative_to(ROOT / package) for package in PACKAGES):
        families = [ROOT / "stability" / family for family in FAMILIES if family != READERS]
        return "user" if path.parent in families and not path.name.startswith("_") else "project"
    return "others" if INSTALLED.search(file) else "user"
