"""``python -m stability.web.checking COMMAND WORDS``: validate a command line as its entry does, and run nothing."""

from __future__ import annotations

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.words import Invocation
from stability.config.parse import SPECS
from stability.printable import print_text

HELP = "python -m stability.web.checking COMMAND [key=value …]"


def main(argv: list[str]) -> int:
    """Print that the words are valid; ValueError with the entry's own message if they are not."""
    command, *words = argv
    read(SPECS[command], Invocation.of(words))
    print_text("valid; this command has no dry run")
    return 0


if __name__ == "__main__":
    run_entry(main, "web", HELP)
