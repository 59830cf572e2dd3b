"""Write the text of ``-h`` from the classes that declare settings; no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from stability.cli.compose import add_listed_plugins
from stability.cli.conf import choices, conf_dir, defaults, is_group, yamls
from stability.cli.description import Command, Group
from stability.cli.settings import Row, choice_rows
from stability.cli.words import Invocation, Word

WIDTH = 120
COLUMN = 32  # where meanings begin
MORE = "\n-h beside a key or a choice shows its settings and their meaning, e.g. of a sweep guards -h, mechanism=sc -h."


def help_text(root: str, head: str, argv: Sequence[str]) -> str:
    """Return the text of ``-h``.

    Args:
        root: the command's name, e.g. ``sweep``.
        head: what it is for, in a few lines.
        argv: the words beside ``-h``. Keys and choices among them are explained instead of the whole command.

    Raises:
        ValueError: a plugin cannot be imported.
    """
    invocation = Invocation.of(argv)
    add_listed_plugins(invocation)
    command = Command(root)
    rows = command.rows
    if asked := [text for word in invocation.words for text in _find_rows(root, rows, word)]:
        return "\n\n".join(dict.fromkeys(asked))
    groups = command.groups
    shown = "".join(_entry(f"{key}={each.default}", ", ".join(each.names)) for key, each in groups.items())
    chosen = f"\n\nChoices: key=default, then all\n{shown.rstrip()}" if shown else ""
    return f"{head.strip()}{chosen}\n\nKeys: key=default\n{_keys(rows, groups)}{MORE}"


def _find_rows(root: str, rows: Iterable[Row], word: Word) -> Iterable[str]:
    """Yield the settings of the choices and keys that a word names."""
    names = [name.strip() for name in (word.value or "").strip("[] ").split(",")]
    if word.key in {group.partition("@")[0] for group in defaults(root)} and is_group(word.key):
        yield from (_choice(word.key, name) for name in names if name in choices(word.key))
        if word.value:
            return
    if word.key != "plugins" and (
        own := [row for row in rows if row.key == word.key or row.key.startswith(f"{word.key}.")]
    ):
        yield _table(own).rstrip()


def _choice(group: str, name: str) -> str:
    """Return the settings of a choice; of a preset the text of its yaml."""
    title = f"{group}={name}"
    if rows := choice_rows(group, name):
        return f"{title}\n{_table(row._replace(needs='') for row in rows).rstrip()}"
    if name in yamls(group):
        text = (conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
        return f"{title}: conf/{group}/{name}.yaml\n{textwrap.indent(text.strip(), '  ')}"
    return f"{title}: no settings"


def _keys(rows: Sequence[Row], groups: Mapping[str, Group]) -> str:
    """Return a line for each key; the keys of a group of settings share one."""
    lines = []
    for first, held in groupby((row for row in rows if not row.needs), key=lambda row: row.key.partition(".")[0]):
        own = list(held)
        inner = [row for row in own if row.key != first]
        if not inner and first not in groups:
            lines.append(_entry(f"{first}={own[0].default}", own[0].meaning))
        elif inner and first not in ("optimizer", "ablate"):
            settings = " ".join(f"{row.key.removeprefix(f'{first}.')}={row.default}" for row in inner)
            lines.append(_entry(f"{first}.", settings))
        else:
            lines += [_entry(f"{row.key}={row.default}".rstrip("="), row.meaning) for row in inner]
    return "".join(lines)


def _table(rows: Iterable[Row]) -> str:
    """Return a line for each row with its default, the choice that it needs and its meaning."""
    return "".join(
        _entry(f"{row.key}={row.default}", f"{f'{row.needs}: ' * bool(row.needs)}{row.meaning}") for row in rows
    )


def _entry(key: str, meaning: str) -> str:
    """Return ``key  meaning``, wrapped behind the column of meanings."""
    start = f"  {key}".ljust(COLUMN) if len(key) + 3 < COLUMN else f"  {key}\n{' ' * COLUMN}"
    indent = " " * COLUMN
    wrapped = textwrap.wrap(
        meaning, WIDTH - COLUMN, break_long_words=False, break_on_hyphens=False, subsequent_indent=""
    )
    return f"{start}{f'{chr(10)}{indent}'.join(wrapped)}".rstrip() + "\n"
