"""A hook of mkdocs: the page of all settings, written from the schema when the documentation is built, so that it
cannot be out of date."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stability.config.base import Settings
from stability.config.identity import group_of
from stability.config.parse import SPECS
from stability.config.parts import Part
from stability.registry import FAMILIES, Registry

PAGE = "reference/settings.md"
INTRODUCTION = """# Settings

Every key of every command, with its default and its meaning, from the schema that validates them. `conf/` holds the same as yaml. A key is written as
`key=value`; one of a group as `group.key=value`, e.g. `evaluation.every_steps=50`; one of a part as `mechanism.sc.window=4`.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page to the documentation's files."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The whole page: a table for each command, then one for each part that has settings."""
    commands = "".join(f"\n## stability.{name}\n\n{_table(rows(schema))}" for name, schema in SPECS.items())
    parts = ""
    for family in FAMILIES:
        registry = Registry(family)
        for name in registry.names():
            own = list(rows(registry.load(name).Config))
            parts += f"\n### {registry.noun} {name}\n\n" + (_table(own) if own else "It has no settings.\n")
    return f"{INTRODUCTION}{commands}\n## Parts\n{parts}"


def rows(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each field, those of groups in their place."""
    for name, field in schema.model_fields.items():
        group = group_of(field.annotation)
        if group is Part:
            yield f"{prefix}{name}", _default(field), f"{field.description or name}; its settings: Parts, below"
        elif group is not None:
            yield from rows(group, f"{prefix}{name}.")
        elif issubclass(schema, Settings) and name == schema.written_flat:
            yield from rows(type(field.get_default(call_default_factory=True)), prefix)
        else:
            yield f"{prefix}{name}", _default(field), field.description or ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(from the yaml)"
    value = field.get_default(call_default_factory=True)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _table(found: Any) -> str:
    lines = [f"| `{key}` | {_cell(default)} | {_cell(meaning)} |\n" for key, default, meaning in found]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
