"""Names and docstrings of Python's own library: pairs of sentences that belong together, without a download.

The pairs differ between Python builds; their fingerprint identifies them.
"""

from __future__ import annotations

import ast
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.sentences.corpus import SentenceCorpus
from stability.corpora.sentences.split import Row, split_rows
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data import AbstractDataSource
from stability.data.stdlib import (
    DOCUMENTED,
    MIN_CHARACTERS,
    StdlibDocstrings,
    clean,
    library_folder,
    library_key,
    parse,
    source_files,
)
from stability.startup import seldom_collected

# Increment if the same installation would give other pairs.
VERSION = 1


class StdlibPairsConfig(Settings):
    """The settings of data=stdlib_pairs."""

    first: Literal["name", "summary"] = Field(
        default="name",
        description="a pair's first sentence: the object's dotted name, or the first line of its docstring; the second "
        "one: the docstring, or the rest of it",
    )
    hold_out: float = Field(
        default=0.1, gt=0, lt=1, description="share of pairs that is held out, by whole top-level modules"
    )


class StdlibPairs(AbstractDataSource):
    """Pairs (name, docstring) of the standard library's modules, classes and functions.

    White space is one space. A docstring shorter than 32 characters is omitted, and one that several objects share is
    that of the first. Both sides have modules of their own.
    """

    corpus: ClassVar[type[AbstractCorpus]] = SentenceCorpus
    Config: ClassVar[type[Settings]] = StdlibPairsConfig

    @classmethod
    def prepare(cls, config: StdlibPairsConfig, scratch: Path | None = None) -> SentenceCorpus:
        """Parse the library's source (some seconds).

        Raises:
            ValueError: this Python has no standard library source in a folder.
        """
        what = "names and docstrings" if config.first == "name" else "first lines and docstrings"
        origin = f"standard library {what} of {platform.python_implementation()} {platform.python_version()}"
        with seldom_collected():  # syntax trees are very many objects
            rows = {row.sentences[1]: row for row in reversed(list(_rows(config)))}
        return split_rows(rows.values(), origin, tokenizer=ByteTokenizer(), scored=False, hold_out=config.hold_out)

    @classmethod
    def cache_key(cls, config: StdlibPairsConfig) -> str:
        return f"{config.model_dump_json()} {library_key(VERSION)}"

    @classmethod
    def inputs(cls, config: StdlibPairsConfig) -> Iterator[Path]:
        """Yield the library's source files and their folders."""
        docstrings: Any = StdlibDocstrings  # whose settings its files do not depend on
        return docstrings.inputs(docstrings.Config())

    @classmethod
    def tokens_of(cls, config: StdlibPairsConfig) -> str:
        return "bytes"


def _rows(config: StdlibPairsConfig) -> Iterator[Row]:
    """Yield every pair of the library, repeated docstrings included."""
    root = library_folder()
    for file in source_files(root):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not module or (tree := parse(file)) is None:
            continue
        for name, docstring in _documented(tree, module):
            head, _, rest = docstring.partition("\n")
            first, second = (name, docstring) if config.first == "name" else (head, rest)
            pair = tuple(" ".join(clean(text).split()) for text in (first, second))
            if len(docstring) >= MIN_CHARACTERS and all(pair):
                yield Row(pair, groups=(parts[0],))


def _documented(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and docstring of the module, its classes and functions, in the order of the source."""
    pending: list[tuple[str, ast.AST]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield name, text
        for block in ("handlers", "finalbody", "orelse", "body"):
            for child in reversed(getattr(node, block, None) or ()):
                own = getattr(child, "name", None) if isinstance(child, DOCUMENTED) else None
                pending.append((f"{name}.{own}" if own else name, child))


EXPORT = StdlibPairs
