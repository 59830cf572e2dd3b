"""Synthetic sentences with a known similarity: the share of words that two of them have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.questions.drawing import draw_different
from stability.corpora.sentences.corpus import SentenceCorpus
from stability.corpora.sentences.split import Row, split_rows
from stability.corpora.tokens.synthetic_genome import Draws
from stability.corpora.tokens.tokenizers import ByteTokenizer
from stability.data._base import AbstractDataSource

# Increment if the same settings would give other sentences.
VERSION = 1
# word lists of a template; a sentence is one word of each, in this order
TEMPLATE = (
    ("red", "blue", "old", "new", "tall", "wet", "mad", "shy"),
    ("dog", "cat", "man", "girl", "king", "fox", "bird", "nun"),
    ("sees", "eats", "sells", "hides", "burns", "draws", "finds", "likes"),
    ("bread", "gold", "milk", "wood", "cloth", "fish", "rice", "snow"),
    ("at home", "by night", "in town", "up north", "for fun", "on foot", "all day", "with joy"),
)
DESCRIPTION = "synthetic pairs (made from a template; the score is the share of equal words)"


class SyntheticPairsConfig(Settings):
    """The settings of data=synthetic_pairs."""

    form: Literal["scored", "pairs", "triplets"] = Field(
        default="scored",
        description="scored: pairs with the share of equal words; pairs: most words are equal; triplets: a third "
        "sentence without an equal word",
    )
    num: int = Field(default=5000, ge=20, le=12_000, description="rows; equal ones count once")
    hold_out: float = Field(default=0.1, gt=0, lt=1, description="share of rows that is held out")
    seed: int = Field(default=0, ge=0, lt=2**20, description="seed that the sentences are drawn from")


class SyntheticPairs(AbstractDataSource):
    """Pairs of sentences of five words, one of eight at each place.

    The second sentence has k words of the first at their places, k drawn from 0 to 5 (scored), or 4 of them (pairs,
    triplets); the others differ. The score is k/5.
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
    """Draw the rows; word numbers of all of them are drawn at once."""
    draws, num, places, choices = Draws(config.seed), config.num, len(TEMPLATE), len(TEMPLATE[0])
    first_MP = draws.draw_below(choices, num * places).reshape(num, places)
    equal_M = draws.draw_below(places + 1, num) if config.form == "scored" else np.full(num, places - 1)
    order_MP = draw_different(draws, num, places, places)
    other_MP, third_MP = (
        (first_MP + 1 + draws.draw_below(choices - 1, num * places).reshape(num, places)) % choices for _ in range(2)
    )
    second_MP = np.where(order_MP < equal_M[:, None], first_MP, other_MP)
    columns = (first_MP, second_MP, third_MP) if config.form == "triplets" else (first_MP, second_MP)
    for number, equal in enumerate(equal_M.tolist()):
        sentences = tuple(_sentence(column[number].tolist()) for column in columns)
        yield Row(sentences, equal / places if config.form == "scored" else 1.0)


def _sentence(numbers: list[int]) -> str:
    return " ".join(words[number] for words, number in zip(TEMPLATE, numbers, strict=True))


EXPORT = SyntheticPairs
