"""Call a module's `main` in a fresh process, and read the numbers that it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

USAGE = 2  # exit code with a message of one line, as of `stability.cli.entry`


def call_fresh(module: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the numbers that `print_numbers` prints in a fresh process of a module.

    Args:
        module: the module's name, for ``python -m``.
        words: of its command line.

    Raises:
        ValueError: the module refused; the message is its own.
        RuntimeError: the process failed otherwise.
    """
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == USAGE:
        raise ValueError(said)
    if done.returncode:
        raise RuntimeError(f"a fresh process of {module} ended with exit code {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def print_numbers(measure: Callable[[], dict[str, Any]]) -> int:
    """Print what a function returns as a line of JSON, or its error as one line; return the exit code."""
    try:
        found = measure()
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        return USAGE
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0
