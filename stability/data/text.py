"""A user's own text files.

A file or a folder of ``.txt``, ``.jsonl``, ``.ndjson`` (each optionally with ``.gz``, ``.zst`` or ``.xz``) and
``.parquet``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from stability.config import Settings
from stability.config.identity import Place
from stability.corpora.io import bar
from stability.corpora.io.files import origin_of, sha256_of_file, suffix_of, total_bytes
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.settings import AbstractTokenized
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.text_files import BLOCK_CHARACTERS, SUFFIXES, documents, text_files
from stability.data import AbstractDataSource

# Increment if the same files would give other documents.
VERSION = 1


class TextConfig(AbstractTokenized):
    """The settings of data=text: files and tokenizer. It trains next-token prediction unless objective= is typed."""

    path: Annotated[str, Place()] = Field(
        min_length=1,
        description="a .txt, .jsonl or .ndjson file (each with .gz, .zst or .xz, too), a .parquet file, or a folder of "
        "them with its subfolders",
    )
    field: str = Field(
        default="text",
        min_length=1,
        description="key that holds the text in a line of a .jsonl file; column of a .parquet file",
    )


class Text(AbstractDataSource):
    """Text documents, strictly UTF-8.

    A document is a line of a ``.jsonl`` file, a row of a ``.parquet`` file, or a block of a ``.txt`` file: about 4,096
    characters, cut at line ends (see `blocks`).
    """

    Config: ClassVar[type[Settings]] = TextConfig

    @classmethod
    def prepare(cls, config: TextConfig, scratch: Path | None = None) -> Corpus:
        """Read every file once.

        Raises:
            ValueError: a file is invalid; the message names file, place and remedy.
        """
        files, tokenizer = text_files(config.path), config.build_tokenizer()
        hint = (
            f".\nA document is a line of a .jsonl file or a block of {BLOCK_CHARACTERS:,} characters of a .txt file; "
            "repetitions count once."
        )
        with bar("reading text", num_bytes=total_bytes(files)):
            found = (text for file in files for text in documents(file, config.field))
            return split_documents(
                found,
                origin_of(config.path, files, "text"),
                hint,
                tokenizer=tokenizer,
                keep=config.keep,
                scratch=scratch,
            )

    @classmethod
    def tokens_of(cls, config: TextConfig) -> str:
        return config.label

    @classmethod
    def cache_key(cls, config: TextConfig) -> str:
        """Return the field, kind and sha256 of each file, and the tokenizer.

        Names and folders of the files do not matter.
        """
        files = [(suffix_of(file, SUFFIXES), sha256_of_file(file)) for file in text_files(config.path)]
        return json.dumps([VERSION, config.field, sorted(files)]) + config.tokenizer_key()


EXPORT = Text
