"""A hook of mkdocs: the page of all settings, written from the classes that declare them when the documentation is
built, so that it cannot be out of date."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from stability.cli.conf import FAMILY_OF, NO_PART, declared_choices
from stability.cli.description import Command
from stability.cli.settings import Row, choice_rows
from stability.config.parse import SPECS

PAGE = "reference/settings.md"
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
INTRODUCTION = """# Settings

Every key of every command, with its default and its meaning, from the classes that validate them; `-h` prints the same. A key is written as
`key=value`, one of a group as `group.key=value`, e.g. `evaluation.every_steps=50`. What stands in `<…>` is yours to fill in. Where a meaning begins with a choice,
as `search=asha`, the key is there with that choice. A yaml in `conf/` is a preset: a choice of other values.
"""
PARTS = """
## Parts

The keys are those of `stability.sweep`. `stability.train_tokenizer` has the same; of data, objective and the like only those of the part that is chosen are there.
"""


def on_config(config: Any) -> Any:
    """Show the version at the foot of every page."""
    config.copyright = f"Version {version('stability-lab')}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the page to the documentation's files."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files of the checkout that the built site lacks by their paths; a link would lead nowhere.

    Args:
        markdown: the page.
        page: its record in MkDocs.
        config: MkDocs' settings.
        files: all files of the site; not read.
    """
    return replace_links(markdown, Path(config.docs_dir), page.file.src_uri)


def replace_links(markdown: str, docs: Path, uri: str) -> str:
    """Return a page whose links to files beside the documentation's folder are their texts and paths.

    Args:
        markdown: the page.
        docs: the documentation's folder.
        uri: the page's path in it.
    """

    def replace(match: re.Match[str]) -> str:
        file = (docs / uri).parent.joinpath(match[2]).resolve()
        if file.is_relative_to(docs.resolve()) or not file.exists():
            return match[0]
        return f"{match[1]} (`{file.relative_to(docs.resolve().parent)}`)"

    return LINK.sub(replace, markdown)


def page() -> str:
    """Return the whole page: a table for each command, then one for each part that has settings."""
    commands = "".join(f"\n## stability.{name}\n\n{_table(_with_choices(Command(name)))}" for name in SPECS)
    own = "".join(
        f"\n### {group} {name}\n\n{_table(row._replace(needs='') for row in rows) or 'It has no settings.'}\n"
        for group, name, rows in parts()
    )
    return f"{INTRODUCTION}{commands}{PARTS}{own}"


def parts() -> list[tuple[str, str, list[Row]]]:
    """Return the rows of every part's own settings, with its group and name."""
    named = [(group, name) for group in FAMILY_OF for name in declared_choices(group)]
    return [(group, name, choice_rows(group, name)) for group, name in named if name not in NO_PART.get(group, ())]


def _with_choices(command: Command) -> list[Row]:
    """Return the rows of a command, those of groups with their choices."""
    return [
        row._replace(meaning=f"{row.meaning}: {', '.join(command.groups[row.key].names)}")
        if row.key in command.groups
        else row
        for row in command.rows
    ]


def _table(found: Iterable[Row]) -> str:
    lines = [
        f"| `{row.key}` | {_cell(row.default)} | {f'`{row.needs}`: ' * bool(row.needs)}{_cell(row.meaning)} |\n"
        for row in found
    ]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(lines) if lines else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
