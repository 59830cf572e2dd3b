"""Describe every command: its keys, their values, its choices, and their settings; no torch.

``-h``, the documentation's page of settings, `stability.describe` and the web page's form are made of this.
"""

from __future__ import annotations

import ast
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stability.cli.conf import FAMILY_OF, choices, declared_choices, defaults, preset_words, yamls
from stability.cli.declared import read_attribute
from stability.cli.settings import Row, choice_rows, command_rows
from stability.config.base import AXES

PACKAGE = Path(__file__).resolve().parents[1]


class Group(NamedTuple):
    """A key that chooses among names.

    Attributes:
        key: e.g. ``mechanism``.
        default: the choice without a word.
        names: all choices that the command takes.
        is_axis: whether a sweep takes several.
    """

    key: str
    default: str
    names: tuple[str, ...]
    is_axis: bool


class Command:
    """One command, described when it is asked for.

    Args:
        name: the entry, e.g. ``sweep``.
    """

    def __init__(self, name: str):
        self.name = name

    @property
    def purpose(self) -> str:
        """What the command does, in one line: the beginning of its module's docstring."""
        file = PACKAGE / self.name / "__main__.py" if (PACKAGE / self.name).is_dir() else PACKAGE / f"{self.name}.py"
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        return first.partition("``: ")[2]

    @cached_property
    def rows(self) -> list[Row]:
        """Every key, with its default and its meaning."""
        return command_rows(self.name)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Every key that chooses among names."""
        rows = {row.key: row for row in self.rows}
        keys = [group.partition("@")[0] for group in defaults(self.name)]
        return {
            key: Group(key, rows[key].default, names_of(self.name, key), self.name == "sweep" and key in AXES)
            for key in keys
            if key in rows
        }

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain JSON, without the choices' settings (`describe_choice`)."""
        return {
            "command": f"python -m stability.{self.name}",
            "purpose": self.purpose,
            "keys": [_row_to_json(row) for row in self.rows],
            "choices": {key: list(group.names) for key, group in self.groups.items()},
        }


def names_of(root: str, group: str) -> tuple[str, ...]:
    """Return the choices of a group that a command takes.

    A probe takes untrained mechanisms, any other command trainable ones.
    """
    names = choices(group)
    if group == "mechanism":
        names = tuple(name for name in names if read_attribute("mechanisms", name, "trainable") == (root != "probe"))
    return names


def describe_choice(group: str, name: str) -> dict[str, Any]:
    """Return the settings of a choice (``keys``), and the words that a preset stands for (``sets``)."""
    is_preset = name in yamls(group) and not (group in FAMILY_OF and name in declared_choices(group))
    sets = {"sets": preset_words(group, name)} if is_preset else {}
    return {"keys": [_row_to_json(row) for row in choice_rows(group, name)], **sets}


def describe_all(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the description of commands and of all their choices as plain JSON.

    Args:
        names: the commands, e.g. ``("sweep",)``.
    """
    commands = {name: Command(name) for name in names}
    groups = {
        key: tuple(dict.fromkeys(choice for each in commands.values() if key in each.groups for choice in choices(key)))
        for each in commands.values()
        for key in each.groups
    }
    return {
        "commands": {name: each.to_json() for name, each in commands.items()},
        "choices": {key: {name: describe_choice(key, name) for name in names} for key, names in groups.items()},
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    needs = {"needs": row.needs} if row.needs else {}
    return {"key": row.key, "default": row.default, "meaning": row.meaning, **row.kind.to_json(), **needs}
