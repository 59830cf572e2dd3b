"""What an entry reads from its words, for tests of everything behind that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stability.cli import compose as composing
from stability.cli.words import Invocation
from stability.config.parse import SPECS


def read_spec(entry: str, words: Iterable[str]) -> Any:
    """The validated spec of ``python -m stability.<entry> <words>``."""
    return composing.read(SPECS[entry], Invocation.of(words))


def compose(entry: str, words: Iterable[str]) -> dict[str, Any]:
    """The plain values that Hydra makes of the words, before they are validated."""
    return composing.compose(entry, Invocation.of(words))


def replaced(words: Iterable[str], *others: str) -> list[str]:
    """The words with others in place of those that set the same keys: a command line sets each key once."""
    keys = {word.partition("=")[0] for word in others}
    return [*(word for word in words if word.partition("=")[0] not in keys), *others]
