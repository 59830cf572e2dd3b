"""``python -m stability``: list the commands."""

from __future__ import annotations

import sys

from stability.cli.description import Command
from stability.cli.entry import FLAGS, USAGE
from stability.config.parse import SPECS
from stability.printable import print_text, replace_unencodable, visible
from stability.registry import near_misses


def main(words: list[str]) -> int:
    """Print every command with its purpose, or how a command is written."""
    replace_unencodable()
    if typed := [word for word in words if word not in FLAGS]:
        name = typed[0]
        told = f"a command is written python -m stability.{name}"
        if name not in SPECS:
            told = f"no such command; {near_misses(name, tuple(SPECS))}"
        print_text(f"error: {visible(name)}: {told}", file=sys.stderr)
        return USAGE
    width = max(map(len, SPECS))
    for name in SPECS:
        print_text(f"python -m stability.{name:{width}}  {Command(name).purpose}")
    print_text("-h after a command lists its keys")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
