"""``python -m stability.describe``: list every key of every command, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from stability.cli.compose import read
from stability.cli.description import Command, describe_all
from stability.cli.entry import run_entry
from stability.cli.words import Invocation
from stability.config.entries import DescribeSpec
from stability.config.parse import SPECS
from stability.printable import print_text
from stability.registry import near_misses

HELP = """
python -m stability.describe [COMMAND] [format=json]

Print every key of every command with its default, its values and its meaning. format=json has types, bounds and choices
under the names of JSON Schema, the settings of every choice, and the words that each preset stands for. The page of
stability.web, the documentation's page of settings and -h are made of the same description.
"""


def main(argv: list[str]) -> int:
    """Print the description of one command or all."""
    spec = read(DescribeSpec, Invocation.of(argv, first="command"))
    if spec.command is not None and spec.command not in SPECS:
        raise ValueError(f"command={spec.command}: no such command; {near_misses(spec.command, tuple(SPECS))}")
    names = tuple(SPECS) if spec.command is None else (spec.command,)
    if spec.format == "json":
        print_text(json.dumps(describe_all(names), indent=1, ensure_ascii=False))
    else:
        print_text("\n\n".join("\n".join(_lines(Command(name))) for name in names))
    return 0


def _lines(command: Command) -> Iterator[str]:
    yield f"python -m stability.{command.name}: {command.purpose}"
    for row in command.rows:
        needs = f"{row.needs}: " if row.needs else ""
        yield f"  {f'{row.key}={row.default}':40} {row.kind}; {needs}{row.meaning}"


if __name__ == "__main__":
    run_entry(main, "describe", HELP)
