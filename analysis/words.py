"""Format numbers and lists for tables, figures and sentences."""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any


def power(value: float, digits: int = 2) -> str:
    """Return a number in short scientific notation as in the paper's tables: 2.2e-3.

    ``digits``: significant digits. 0 and ∞ are unchanged, NaN is ``--``.
    """
    if math.isnan(value):
        return "--"
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else ("∞" if value > 0 else "-∞")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def significant(value: float, digits: int = 2) -> str:
    """Return a number of some significant digits, outside 0.01…9,999 as a power of ten: 380, 0.21, 7.1e5.

    NaN is ``--``.
    """
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:g}" if value == 0 or 0.01 <= abs(rounded) < 1e4 else power(value, digits)


def lr_text(lr: float) -> str:
    """Return a learning rate as typed by users: 3e-4, 7.5e-4, 1e-1."""
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
    """Return a count's range over runs, or one number if all agree."""
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
    """Return a count with its noun: 1 seed, 1,500 steps."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def join_words(words: Iterable[str]) -> str:
    """Return the items as a list in words: a, b and c."""
    items = list(words)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def value_text(value: Any) -> str:
    """Return a value as on the command line: 4, 0.1, true, [sa,sc]. Long lists as in `shortened`."""
    if isinstance(value, list):
        return shorten(f"[{','.join(map(value_text, value))}]")
    return f"{value:.9g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def shorten(label: str) -> str:
    """Return a label with repeated names counted: pattern=[gla,gla,gla,sa] becomes pattern=[3×gla,sa].

    Numbers are unchanged.
    """
    return re.sub(r"\[([^\[\]]+)\]", lambda found: f"[{','.join(_count(found[1].split(',')))}]", label)


def _count(items: list[str]) -> Iterator[str]:
    """Yield each run of equal names with its length."""
    for item, same in itertools.groupby(items):
        number = len(list(same))
        if number > 1 and item[:1].isalpha() and item not in ("true", "false", "null"):
            yield f"{number}×{item}"
        else:
            yield from [item] * number


def wrap(name: str, width: int) -> str:
    """Return a name in lines of at most ``width`` characters.

    Breaks at spaces; in longer words after "=" or ",", else after "_", else between any letters.
    """
    lines = [""]
    for word in name.split(" "):
        glue = " " if lines[-1] else ""
        for piece in _pieces(word, width, ("=,", "_")):
            if len(lines[-1]) + len(glue) + len(piece) <= width:
                lines[-1] += glue + piece
            else:
                lines.append(piece)
            glue = ""
    return "\n".join(line for line in lines if line)


def _pieces(word: str, width: int, separators: tuple[str, ...]) -> list[str]:
    """Return a word in parts of at most ``width`` characters; whole if short."""
    if len(word) <= width:
        return [word]
    if not separators:
        return textwrap.wrap(word, width)
    parts = re.findall(f"[^{separators[0]}]*[{separators[0]}]|[^{separators[0]}]+", word)
    return [piece for part in parts for piece in _pieces(part, width, separators[1:])]


def without_folders(command: str) -> str:
    """Return a recorded command with only the last names of paths.

    ``data.path=/home/me/x.txt`` becomes ``data.path=x.txt``. Paths below the working folder and names like
    ``openai/gpt2`` are unchanged.
    """
    program, *words = re.split(r" (?=[+~]*\w[\w.]*=)", command)
    return " ".join([*(_last_name(word) for word in program.split(" ")), *map(_value_without_folders, words)])


def _value_without_folders(word: str) -> str:
    key, _, value = word.partition("=")
    if value[:1] + value[-1:] != "[]":
        return f"{key}={_last_name(value)}"
    return f"{key}=[{','.join(map(_last_name, value[1:-1].split(',')))}]"


def _last_name(value: str) -> str:
    """Return the last name of a path from root, home or a parent folder. ``ckpt:`` and quotes are kept."""
    found = re.fullmatch(r"(\s*['\"]?(?:\w+:)?)((?:~|\.\.?(?=/)|[A-Za-z]:\\|/).*?)([/\\]*['\"]?\s*)", value, re.DOTALL)
    if found is None:
        return value
    before, path, after = found.groups()
    return before + re.split(r"[/\\]", path)[-1] + after


def without_places(text: str) -> str:
    """Return a sentence, e.g. a failure's reason, with absolute paths cut to their last names."""
    return re.sub(r"(?<![\w/.:<])~?/(?:[^\s/'\":]+/)+", "", text)
