"""Write numbers and lists as tables, figures and sentences have them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any


def power(value: float, digits: int = 2) -> str:
    """Return a number in short scientific notation as in the paper's tables: 2.2e-3, with ``digits`` significant ones;
    0 and ∞ as they are."""
    if math.isnan(value):
        return "--"
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else ("∞" if value > 0 else "-∞")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def lr_text(lr: float) -> str:
    """Return a learning rate as the user wrote it: 3e-4, 7.5e-4, 1e-1."""
    mantissa, _, exponent = power(lr, digits=4).partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}" if exponent else mantissa


def short_count(number: float) -> str:
    """Return a count in three digits: 2345678 → 2.35 M; 102400 → 102 k."""
    if not math.isfinite(number):
        return "not recorded"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def count_range(numbers: Iterable[float]) -> str:
    """Return the range of a count over runs: one number where all agree."""
    finite = [number for number in numbers if math.isfinite(number)]
    if not finite:
        return "not recorded"
    low, high = short_count(min(finite)), short_count(max(finite))
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """Return a time in seconds as text: 47 s, 6 min 03 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "not recorded"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: 1 seed, 2 seeds."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[str]) -> str:
    """Return the items as a list in words: a, b and c."""
    items = list(words)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def value_text(value: Any) -> str:
    """Return a value as it is written on the command line: 4, 0.1, true, [sa,sc]."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    return f"{value:.9g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
