"""Make text from users, models and files safe to print. Imports no other module of this project."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable
from typing import TextIO

PLAIN_WORD = re.compile(r"[\w@%+=:,./\[\]-]+")  # a shell takes such a word as it is
JOINERS = "\u200c\u200d"  # required by Persian, Indic scripts and emoji; they move no other character


def visible(text: object, keep: str = "") -> str:
    r"""Return the text with each control character escaped, e.g. ``\x1b``.

    Args:
        text: Any text. C0 and C1 controls, DEL, marks of direction (U+202A–U+202E, U+2066–U+2069), separators of lines,
            invisible and private characters and lone surrogates are escaped.
        keep: Characters left unchanged, e.g. the line feed.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(each if _is_shown(each) or each in keep else _escaped(each) for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def shell_text(*words: object) -> str:
    """Return words for a shell: those with spaces, braces or quotes are quoted, ``mechanism=[sa,sc]`` is not."""
    return " ".join(text if PLAIN_WORD.fullmatch(text) else shlex.quote(text) for text in map(str, words))


def line_of(error: object, number: int = 0) -> str:
    """Return one line of an error's text; the name of its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[number] if lines else type(error).__name__


def print_text(text: object = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print text with its control characters `visible`.

    Args:
        text: any text; line feeds and tabs stay, and ``?`` replaces characters missing from the stream's encoding.
        file: the stream; None: standard output.
        flush: as in `print`.
    """
    stream = file or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = visible(text, keep="\n\t").encode(encoding, "replace").decode(encoding)
    print(shown, file=stream, flush=flush)


def print_note(text: str) -> None:
    """Print sentences as `print_text` does; on a terminal their lines break between words."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
        )
        text = "\n".join(lines)
    print_text(text)


def print_notes(texts: Iterable[str]) -> None:
    for text in texts:
        print_note(text)


def replace_unencodable() -> None:
    """Set standard output to print ``?`` for characters missing from its encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
