"""Synthetic sentences with a known similarity: the share of meanings that two of them have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.questions.corpus import draw_different
from stability.corpora.sentences.corpus import SentenceCorpus
from stability.corpora.sentences.split import Row, split_rows
from stability.corpora.tokens.synthetic_genome import Draws
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data import AbstractDataSource

# Increment if the same settings would give other sentences.
VERSION = 2
# two words of each meaning, without a common letter: bytes say nothing about the score
MEANINGS = (
    ("big", "vast"),
    ("dog", "pup"),
    ("glad", "merry"),
    ("run", "jog"),
    ("job", "task"),
    ("ship", "boat"),
    ("food", "meal"),
    ("lad", "boy"),
    ("aid", "help"),
    ("rug", "mat"),
    ("wet", "damp"),
    ("cash", "money"),
    ("hut", "cabin"),
    ("cry", "sob"),
    ("war", "fight"),
    ("see", "look"),
)
FILLERS = ("a", "the", "so", "of", "then", "at", "this", "it")  # without a meaning
WORDS, NUM_FILLERS = 4, 1  # of a sentence: words with a meaning, and fillers
DESCRIPTION = "synthetic pairs (words of a small dictionary; the score is the share of equal meanings)"


class SyntheticPairsConfig(Settings):
    """The settings of data=synthetic_pairs."""

    form: Literal["scored", "pairs", "triplets"] = Field(
        default="scored",
        description="scored: pairs with the share of equal meanings; pairs: all meanings are equal; triplets: a third "
        "sentence without an equal meaning",
    )
    num: int = Field(default=10_000, ge=20, le=100_000, description="rows; equal ones count once")
    hold_out: float = Field(default=0.1, gt=0, lt=1, description="share of rows that is held out")
    seed: int = Field(default=0, ge=0, lt=2**20, description="seed that the sentences are drawn from")


class SyntheticPairs(AbstractDataSource):
    """Pairs of sentences of four words with a meaning and a filler, in random order.

    The second sentence has k meanings of the first, each by its other word, k drawn from 0 to 4 (scored), or all 4
    (pairs, triplets). The score is k/4. No word with a meaning is in both sentences.
    """

    corpus: ClassVar[type[AbstractCorpus]] = SentenceCorpus
    Config: ClassVar[type[Settings]] = SyntheticPairsConfig

    @classmethod
    def prepare(cls, config: SyntheticPairsConfig, scratch: Path | None = None) -> SentenceCorpus:
        return split_rows(
            _draw_rows(config),
            DESCRIPTION,
            tokenizer=ByteTokenizer(),
            scored=config.form == "scored",
            hold_out=config.hold_out,
        )

    @classmethod
    def cache_key(cls, config: SyntheticPairsConfig) -> str:
        return f"{VERSION} {config.model_dump_json()}"

    @classmethod
    def tokens_of(cls, config: SyntheticPairsConfig) -> str:
        return "bytes"


def _draw_rows(config: SyntheticPairsConfig) -> Iterator[Row]:
    """Draw the rows; the numbers of all of them are drawn at once."""
    draws, num = Draws(config.seed), config.num
    first_MW, other_MW, third_MW = np.split(draw_different(draws, num, len(MEANINGS), 3 * WORDS), 3, axis=1)
    equal_M = draws.draw_below(WORDS + 1, num) if config.form == "scored" else np.full(num, WORDS)
    second_MW = np.where(np.arange(WORDS) < equal_M[:, None], first_MW, other_MW)
    side_MW = draws.draw_below(2, num * WORDS).reshape(num, WORDS)
    columns = [(first_MW, side_MW), (second_MW, 1 - side_MW), (third_MW, side_MW)]
    drawn = [_sentences(draws, *column) for column in columns[: 3 if config.form == "triplets" else 2]]
    for sentences, equal in zip(zip(*drawn, strict=True), equal_M.tolist(), strict=True):
        yield Row(sentences, equal / WORDS if config.form == "scored" else 1.0)


def _sentences(draws: Draws, meanings_MW: np.ndarray, side_MW: np.ndarray) -> list[str]:
    """Return the sentences of these words, with fillers, in random order."""
    num, length = len(meanings_MW), WORDS + NUM_FILLERS
    filler_MF = draws.draw_below(len(FILLERS), num * NUM_FILLERS).reshape(num, NUM_FILLERS)
    words_ML = np.concatenate([np.array(MEANINGS)[meanings_MW, side_MW], np.array(FILLERS)[filler_MF]], axis=1)
    order_ML = draw_different(draws, num, length, length)
    return [" ".join(row) for row in np.take_along_axis(words_ML, order_ML, axis=1).tolist()]


EXPORT = SyntheticPairs
