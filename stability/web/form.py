"""A command as a form: words of a command line ↔ fields ↔ YAML, in both directions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from stability.cli.conf import choices, preset_words
from stability.cli.declared import Kind
from stability.cli.description import Command, Group
from stability.cli.places import quote_text
from stability.cli.settings import Row, choice_rows
from stability.cli.words import A_RATE, Word
from stability.config.ablation import value_text
from stability.config.base import AXES
from stability.config.parse import SPECS

COMMANDS = tuple(name for name in SPECS if name != "web")
SWEEP, PRESET = "sweep", "study"
# sections of a sweep's form, by the first part of a key; all others are in the last one
SECTIONS: dict[str, tuple[str, ...]] = {
    "Preset": ("study",),
    "What is compared": (*AXES, "precision", "ablate", "vary"),
    "Learning rates": ("lr", "seeds", "first_seed"),
    "Model": ("model", "ffn", "position", "linear", "cross", "init"),
    "Task and data": ("objective", "data"),
    "Training": ("steps", "batch", "microbatch", "clip_norm", "schedule", "compile", "cuda_graphs"),
    "Evaluation and verdict": ("evaluation", "checkpoint", "verdict"),
    "Guards": ("guards",),
    "Curvature": ("hessian", "curvature", "log"),
    "Samples": ("generate",),
    "Search": ("search", "halving"),
    "Where it runs": (
        "launcher", "device", "threads", "retry", "cpus_per_trial", "gpus_per_trial", "devices_per_trial",
        "shard_parameters", "ray", "slurm", "plan_gpu", "dry_run",
    ),
    "Study, report and loggers": (),
}  # fmt: skip
OPEN = ("Preset", "What is compared", "Learning rates", "Settings")


class Field(NamedTuple):
    """One input of the form.

    Attributes:
        row: its key, meaning and values.
        value: the text typed into it; "" for none.
        default: the value without a word, under the chosen preset and parts.
        group: its choices, or None.
        chosen: names selected on an axis, or in a list of words.
    """

    row: Row
    value: str
    default: str
    group: Group | None
    chosen: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """Words to choose among; () for a text."""
        if self.group is not None:
            return self.group.names
        if self.row.kind.choices:
            return tuple(value_text(word) for word in self.row.kind.choices)
        return ("true", "false") if self.row.kind.type == "boolean" else ()

    @property
    def is_list(self) -> bool:
        """Whether several of its options can be chosen."""
        return bool(self.options) and (self.group.is_axis if self.group is not None else self.row.kind.is_list)

    @property
    def is_named_by_user(self) -> bool:
        """Whether its key contains a name of the user's own, e.g. ``ablate.<part>.<setting>``."""
        return "<" in self.row.key


@cache
def command_of(name: str) -> Command:
    """Return a command's description; it is made once."""
    return Command(name)


@cache
def settings_of(group: str, name: str) -> tuple[Row, ...]:
    """Return the settings of a choice; () for one without settings."""
    return tuple(choice_rows(group, name))


@dataclass(frozen=True)
class Form:
    """The words of one command.

    Attributes:
        command: the entry's name.
        values: the text of each filled field by key, as it is typed behind ``=``.
        more: words that no field holds, e.g. ``ablate.sc.window=[2,4]``.
    """

    command: str
    values: Mapping[str, str]
    more: tuple[str, ...] = ()

    @classmethod
    def of_words(cls, command: str, words: Iterable[str]) -> Form:
        """Return the form that a command line fills in."""
        values: dict[str, str] = {}
        more: list[str] = []
        found = [Word.of(text) for text in words]
        chosen = cls(command, {word.key: word.value for word in found if word.value is not None and not word.sign})
        known = chosen.rows
        for word in found:
            row = known.get(word.key) if not word.sign else None
            if row is None or not word.value or word.key in values or not chosen._holds(word.key, word.value):
                more.append(str(word))
            else:
                values[word.key] = word.value
        return cls(command, values, tuple(more))

    @classmethod
    def of_yaml(cls, command: str, text: str) -> Form:
        """Return the form that a YAML fills in: the page's own, or a preset of conf/study.

        Raises:
            ValueError: it is no mapping of keys to values; one line.
        """
        if named := re.match(r"# python -m stability\.(\w+)", text):
            command = named[1] if named[1] in COMMANDS else command
        try:
            events = yaml.parse(text, Loader=yaml.BaseLoader)
            if any(isinstance(each, yaml.AliasEvent) for each in events):  # nested ones grow without end
                raise ValueError("this YAML has an alias (*name); write its value there")
            found = yaml.load(text, Loader=yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"this YAML cannot be read: {str(error).splitlines()[0]}") from None
        if found is not None and not isinstance(found, dict):
            raise ValueError("this YAML is no mapping; write key: value in each line")
        return cls.of_words(command, _words_of_yaml(found or {}))

    def at(self, runs_dir: Path, reports_dir: Path) -> Form:
        """Return the form with the page's folders, where the command would use others."""
        places = {"runs_dir": runs_dir, "reports_dir": reports_dir}
        own = {
            key: str(path)
            for key, path in places.items()
            if key in self.rows and key not in self.values and Path(self.rows[key].default).resolve() != path
        }
        return Form(self.command, {**self.values, **own}, self.more) if own else self

    @property
    def words(self) -> list[str]:
        """The words of the command line: only what was filled in, in the form's order."""
        titles = list(SECTIONS)
        order = {key: (titles.index(_section_of(key, titles)), place) for place, key in enumerate(self.rows)}
        keys = sorted(self.values, key=lambda key: order.get(key, (len(titles), 0)))
        return [f"{key}={self._typed(key)}" for key in keys if self.values[key]] + list(self.more)

    @property
    def line(self) -> str:
        """The command line for a shell."""
        return f"python -m stability.{self.command} {shlex.join(self.words)}".rstrip()

    @property
    def more_text(self) -> str:
        """The further words, one a line, as a shell reads them."""
        return "\n".join(map(shlex.quote, self.more))

    @property
    def yaml(self) -> str:
        """The words as YAML, which `of_yaml` reads back."""
        lines = [f"# python -m stability.{self.command}"]
        for word in self.words:
            key, equals, value = word.partition("=")
            line = f"{key}: {value}" if equals else f"{json.dumps(key)}: ''"
            lines.append(line if _reads(line, word) else f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Every key of the command and of its chosen parts, in order."""
        rows: dict[str, Row] = {}
        for row in command_of(self.command).rows:
            if (known := rows.get(row.key)) is not None:  # e.g. search.seed of search=optuna and of search=pbt
                meaning = f"{known.meaning}; with {row.needs}: {row.meaning}"
                row = known._replace(meaning=meaning, needs=f"{known.needs} or {row.needs}")
            rows[row.key] = row
        chosen = [row for group, name in self.choices for row in settings_of(group, name)]
        return rows | {row.key: row._replace(needs="") for row in chosen}

    @cached_property
    def choices(self) -> list[tuple[str, str]]:
        """The chosen names, by group: as filled in, else of the preset, else the default."""
        preset, found = self._preset, []
        for group in command_of(self.command).groups.values():
            text = self.values.get(group.key) or preset.get(group.key) or group.default
            text = "values" if group.key == "lr" and A_RATE.match(text) else text
            found += [(group.key, name) for name in _names(text) if name in choices(group.key)]
        return found

    @cached_property
    def _preset(self) -> dict[str, str]:
        """The words that the chosen preset stands for."""
        if self.command != SWEEP:
            return {}
        default = command_of(SWEEP).groups[PRESET].default
        name = self.values.get(PRESET) or default
        found = dict(preset_words(PRESET, name)) if name in choices(PRESET) else {}
        replaced = [key for key in found if key in self.values and self.values[key] != found[key]]
        return {key: text for key, text in found.items() if not key.startswith(tuple(f"{each}." for each in replaced))}

    @cached_property
    def defaults(self) -> dict[str, str]:
        """The values without a word, under the chosen preset and parts."""
        found = {row.key: row.default for row in command_of(self.command).rows}
        for group, name in self.choices:
            found |= {row.key: row.default for row in settings_of(group, name)}
        return found | self._preset

    def sections(self) -> dict[str, list[Field]]:
        """Return the fields by section; parts' own settings follow their part."""
        groups, defaults, rows = command_of(self.command).groups, self.defaults, self.rows
        found: dict[str, list[Field]] = {title: [] for title in SECTIONS} if self.command == SWEEP else {"Settings": []}
        for key, row in rows.items():
            kept = self.values.get(key, "")
            found[_section_of(key, list(found))].append(
                Field(row, kept, defaults.get(key, row.default), groups.get(key), tuple(_names(kept)) if kept else ())
            )
        for fields in found.values():  # choices first, then settings, each behind its part
            order = list(dict.fromkeys(field.row.key.partition(".")[0] for field in fields))
            fields.sort(key=lambda field: (field.group is None, order.index(field.row.key.partition(".")[0])))
        return {title: fields for title, fields in found.items() if fields}

    def problem_key(self, message: str) -> str:
        """Return the key that a message of the command line begins with; "" if it is of none."""
        key = re.match(r"'?([\w.]+)", message)
        return key[1] if key and key[1] in self.rows else ""

    def _holds(self, key: str, value: str) -> bool:
        """Return whether a key's field can hold a value: a list of options holds names only."""
        field = Field(self.rows[key], value, "", command_of(self.command).groups.get(key), tuple(_names(value)))
        if field.is_named_by_user:
            return False
        names = _names(value)
        return not field.is_list or (len(set(names)) == len(names) > 0 and set(names) <= set(field.options))

    def _typed(self, key: str) -> str:
        """Return a value as it is typed: a text in quotes where it needs them."""
        value, kind = self.values[key], self.rows[key].kind if key in self.rows else Kind()
        is_text = kind.type == "text" and not (kind.choices or kind.is_list)
        return value if not is_text or (kind.is_optional and value == "null") else quote_text(value)


def words_of_text(text: str) -> tuple[str, ...]:
    """Return the words of a text, as a shell splits it.

    Raises:
        ValueError: a quote has no end.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"more words: {str(error).lower()}; write a quote within quotes as in a shell") from None


def join_names(names: Sequence[str]) -> str:
    """Return the chosen names as they are typed: ``sa``, or ``[sa,sc]``."""
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def _section_of(key: str, titles: Sequence[str]) -> str:
    first = key.partition(".")[0]
    return next((title for title in titles if first in SECTIONS.get(title, ())), titles[-1])


def _names(text: str) -> list[str]:
    inner = text.strip()
    inner = inner[1:-1] if inner[:1] == "[" and inner[-1:] == "]" else inner
    return [name.strip() for name in inner.split(",")]


def _reads(line: str, word: str) -> bool:
    """Return whether a line of YAML is read back as the word."""
    try:
        return list(_words_of_yaml(yaml.load(line, Loader=yaml.BaseLoader))) == [word]
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
        return False


def _words_of_yaml(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the words that a YAML's values stand for."""
    for key, value in values.items():
        if key == "defaults" and not prefix and isinstance(value, list):  # a preset of conf/study
            yield f"~{PRESET}"
            for entry in value:
                if isinstance(entry, dict):
                    yield from _words_of_yaml({name.removeprefix("override /"): each for name, each in entry.items()})
                elif entry in choices(PRESET):
                    yield from (f"{name}={text}" for name, text in preset_words(PRESET, entry).items())
        elif isinstance(value, dict):
            yield from _words_of_yaml(value, f"{prefix}{key}.")
        elif key.startswith("~") and value == "":
            yield key
        else:
            yield f"{prefix}{key}={_typed_value(value)}"


def _typed_value(value: Any) -> str:
    """Return a value of a YAML, whose scalars are texts, as it is typed."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed_value(each)}" for key, each in value.items()) + "}"
    return str(value)
