"""A user's own pairs of sentences: csv, tsv, jsonl or parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from stability.config import Settings
from stability.config.identity import Place
from stability.corpora.base import AbstractCorpus
from stability.corpora.io import bar
from stability.corpora.io.files import origin_of, sha256_of_file, suffix_of, total_bytes
from stability.corpora.sentences.corpus import SentenceCorpus
from stability.corpora.sentences.split import SUFFIXES, pair_files, read_rows, split_rows
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data import AbstractDataSource

# Increment if the same files would give other pairs.
VERSION = 1


class PairsConfig(Settings):
    """The settings of data=pairs: files with the columns a, b, score or anchor, positive[, negative]."""

    path: Annotated[str, Place()] = Field(
        min_length=1, description="a .csv, .tsv, .jsonl or .parquet file, or a folder of them with its subfolders"
    )
    range: tuple[float, float] | None = Field(
        default=None, description="lowest and highest score, mapped to 0 and 1; null: scores are between -1 and 1"
    )
    hold_out: float = Field(default=0.1, gt=0, lt=1, description="share of rows that is held out")

    @model_validator(mode="after")
    def _check_range(self) -> PairsConfig:
        if self.range is not None and not self.range[0] < self.range[1]:
            low, high = self.range
            raise ValueError(f"data.range=[{low:g},{high:g}]: the first number must be below the second, e.g. [0,5]")
        return self


class Pairs(AbstractDataSource):
    """Rows of sentences; texts are UTF-8 with single spaces.

    The sides share no sentence: rows with a common sentence are connected, and connected rows are on one side.
    """

    corpus: ClassVar[type[AbstractCorpus]] = SentenceCorpus
    Config: ClassVar[type[Settings]] = PairsConfig

    @classmethod
    def prepare(cls, config: PairsConfig, scratch: Path | None = None) -> SentenceCorpus:
        """Read every file once.

        Raises:
            ValueError: a file is invalid; the message names file, line and remedy.
        """
        files = pair_files(config.path)
        with bar("reading pairs", num_bytes=total_bytes(files)):
            rows, scored = read_rows(files, config.range)
        origin = origin_of(config.path, files, "pairs")
        return split_rows(rows, origin, tokenizer=ByteTokenizer(), scored=scored, hold_out=config.hold_out)

    @classmethod
    def tokens_of(cls, config: PairsConfig) -> str:
        return "bytes"

    @classmethod
    def cache_key(cls, config: PairsConfig) -> str:
        """Return the settings, and kind and sha256 of each file.

        Names and folders of the files do not matter.
        """
        files = [(suffix_of(file, SUFFIXES), sha256_of_file(file)) for file in pair_files(config.path)]
        return json.dumps([VERSION, config.range, config.hold_out, sorted(files)])


EXPORT = Pairs
